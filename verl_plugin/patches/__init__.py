"""What has to differ from upstream where it has no extension point: one module for each module of upstream.

Each patch says what upstream does, why no extension point serves, and when it can go; `python -m overlay list --stack
2026` lists them. `overlay.activate(stack="2026")` applies them, which the modules of `verl_plugin` call that need one:
verl imports those through VERL_USE_EXTERNAL_MODULES or `actor_rollout_ref.model.external_lib`.
"""
