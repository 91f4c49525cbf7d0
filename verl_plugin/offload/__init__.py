"""Offloads training's state in the order of the recipe: state that the next phase needs stays on the die.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.offload.engines]

Without the module, verl 0.9.1 offloads everything after each pass of an engine: parameters leave after the update,
return to be offered to the rollout, and leave again; and parameters that no update wrote are copied to the host too.
"""

LIBRARY = "verl_plugin.offload.engines"
