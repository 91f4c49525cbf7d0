"""Leaves out verl's forward for old log-probs: with one update of each batch the update's own forward has them.

    trainer.v1.trainer_mode=sync_onpolicy
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=verl_plugin.onpolicy.registration

The first key selects the trainer that the second registers in verl's processes. It is verl's `sync`, for runs in which
each batch is used for one update; it loads `engines`, whose update uses its own log-probs, without gradient, as the
loss's old ones. docs/algorithms.md has the conditions.
"""
