"""What has to differ from upstream where it has no extension point: one module for each module of upstream.

Each module says what upstream does, why no extension point serves, and when it can go. `apply` is called by the module
of `verl_plugin` that needs it, and by nothing else.
"""
