"""Turn the overlay on: importing this module finds and applies all patches.

Either verl imports it, by the one line `from verl_patches import prelude_patch`, or an entry point does, together with
`runtime_env={"worker_process_setup_hook": prelude_patch.activate}` for its Ray workers. It imports nothing of upstream.
"""

import overlay


def activate() -> None:
    """Apply all patches in this process, now or when their targets are imported. A second call does nothing."""
    overlay.activate()


activate()
