"""Values of `trainer.v1.trainer_mode`: the trainers that this project registers, and verl's."""

MODE_KEY = "trainer.v1.trainer_mode"
SYNCHRONOUS = "sync"
"""verl's own, in which training and rollout take turns."""
ONE_FORWARD = "sync_onpolicy"
"""verl's `sync` without the forward for old log-probs; it records steps too."""
RECORDED = "sync_recorded"
"""verl's `sync`, which records steps."""
SEPARATE = "separate_async"
"""verl's own, which runs training and rollout at the same time, each on its own dies.

In a job it needs a log level of its own: docs/upstream/verl-separate-async-logging.md.
"""
COLOCATED = "colocate_async"
"""verl's own, in which training and rollout share dies, and answers are interrupted while it trains."""
MODULES = "VERL_USE_EXTERNAL_MODULES"
MODULES_KEY = f"ray_kwargs.ray_init.runtime_env.env_vars.{MODULES}"
REGISTRATION = "verl_plugin.onpolicy.registration"
"""The module that registers both trainers when that variable names it."""
