#!/usr/bin/env python3
"""The command `ray`, without the servers of Ray that run commands for whoever connects, and that no option closes.

`ray start` opens Ray Client (port 10001) on a head, and on every node an agent whose HTTP port 52365 takes jobs; both
listen on all interfaces and ask for no password. Ray leaves them away where the packages that they need are missing, so
this program lets Ray miss them.

While Ray runs (`--block`), it holds the dies that the node gives (`--resources`); a second job that wants one is
rejected.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402  (found from where this file lies)
from verl_patches.trainer.isolated_ray import without_job_servers  # noqa: E402  (found from where this file lies)

_RESOURCES = "--resources="
# The names under which `ray start` asks whether there is Ray Client, of Ray 2.46 and of 2.60, and the answer no.
_NO_CLIENT = {
    "check_ray_client_dependencies_installed": lambda: False,
    "get_ray_client_dependency_error": lambda: "left out",
}


def main() -> None:
    """Runs `ray` with this program's arguments; ends with its exit code."""
    try:
        with claimed_dies(dies_of_node(sys.argv[1:])):
            run_ray()
    except DiesInUse as error:
        sys.exit(f"error: {error}")


def dies_of_node(arguments: Sequence[str]) -> int:
    """The NPUs that a node gives to Ray."""
    given = [json.loads(each.removeprefix(_RESOURCES)) for each in arguments if each.startswith(_RESOURCES)]
    return int(given[-1].get("NPU", 0)) if given else 0


def run_ray() -> None:
    """Runs `ray` without those servers."""
    with without_job_servers():
        from ray.scripts import scripts

        asked = [name for name in _NO_CLIENT if callable(getattr(scripts, name, None))]
        if not asked:  # without it, this would do nothing
            sys.exit(
                "error: this Ray asks otherwise whether to start Ray Client; bring scripts/internal/start_ray.py up to "
                "it"
            )
        for name in asked:
            setattr(scripts, name, _NO_CLIENT[name])
        scripts.main()


if __name__ == "__main__":
    sys.argv[0] = "ray"
    main()
