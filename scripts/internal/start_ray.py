#!/usr/bin/env python3
"""The command `ray`, without the servers of Ray 2.46 that run commands for whoever connects, and that no option closes.

`ray start` opens Ray Client (port 10001) on a head, and on every node an agent whose HTTP port 52365 takes jobs; both
listen on all interfaces and ask for no password. Ray leaves them away where the packages that they need are missing, so
this program lets Ray miss them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl_patches.trainer.own_ray import without_job_servers  # noqa: E402  (found from where this file lies)


def main() -> None:
    """Runs `ray` with this program's arguments; ends with its exit code."""
    with without_job_servers():
        from ray.scripts import scripts

        # The name under which `ray start` asks whether there is Ray Client; without it, this would do nothing.
        if not callable(getattr(scripts, "check_ray_client_dependencies_installed", None)):
            sys.exit(
                "error: this Ray asks otherwise whether to start Ray Client; bring scripts/internal/start_ray.py up to "
                "it"
            )
        scripts.check_ray_client_dependencies_installed = lambda: False
        scripts.main()


if __name__ == "__main__":
    sys.argv[0] = "ray"
    main()
