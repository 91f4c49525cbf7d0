"""Training's state leaves a die, and returns, in the order of the recipe: nothing leaves that the next phase needs.

    actor_rollout_ref.model.external_lib=[...,verl_plugin.offload.engines]

Without the module, verl 0.9.1 moves everything out after each pass of an engine: parameters leave after the update,
return to be offered to the rollout, and leave again; and what no update wrote is copied to the host all the same.
"""

LIBRARY = "verl_plugin.offload.engines"
