"""Patches of upstream code that has no extension point: one module for each module of upstream.

Each patch says what upstream does, why no extension point serves, and when it can go; `python -m overlay list --stack
2026` lists them. Modules of `verl_plugin` that need a patch call `overlay.activate(stack="2026")`, which applies them;
verl imports these modules through VERL_USE_EXTERNAL_MODULES or `actor_rollout_ref.model.external_lib`.
"""
