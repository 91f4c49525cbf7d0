"""Heartbeats of verl's processes, a driver that names the one that stopped, and the collectives of a hang.

    trainer.v1.trainer_mode=sync_recorded          or sync_onpolicy
    +trainer.hang_detection.enabled=true
    actor_rollout_ref.model.external_lib=[...,verl_plugin.heartbeats.engines]

docs/operations.md says which hangs are detected and which are not.
"""
