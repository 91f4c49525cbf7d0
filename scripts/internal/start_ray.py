#!/usr/bin/env python3
"""Run the command `ray` without those of its servers that run commands for anybody and that no option disables.

`ray start` opens Ray Client (port 10001) on a head, and on every node an agent whose HTTP port 52365 accepts jobs; both
listen on all interfaces and ask for no password. Ray leaves them out if the packages that they need are missing, so
this program makes Ray believe that they are.

While Ray runs (`--block`), it holds the dies that the node provides (`--resources`); a second job that needs one of
them is rejected.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402  (found from where this file lies)
from verl_patches.trainer.isolated_ray import without_job_servers  # noqa: E402  (found from where this file lies)

_RESOURCES = "--resources="
# Functions with which `ray start` of Ray 2.46 and of 2.60 asks whether Ray Client is available, with the answer no.
_NO_CLIENT = {
    "check_ray_client_dependencies_installed": lambda: False,
    "get_ray_client_dependency_error": lambda: "left out",
}


def main() -> None:
    """Run `ray` with this program's arguments and end with its exit code."""
    try:
        with claimed_dies(dies_of_node(sys.argv[1:])):
            run_ray()
    except DiesInUse as error:
        sys.exit(f"error: {error}")


def dies_of_node(arguments: Sequence[str]) -> int:
    """Return the number of NPUs that a node gives to Ray."""
    given = [json.loads(each.removeprefix(_RESOURCES)) for each in arguments if each.startswith(_RESOURCES)]
    return int(given[-1].get("NPU", 0)) if given else 0


def run_ray() -> None:
    """Run `ray` without those servers."""
    with without_job_servers():
        from ray.scripts import scripts

        asked = [name for name in _NO_CLIENT if callable(getattr(scripts, name, None))]
        if not asked:  # none would be replaced, so Ray Client would start
            sys.exit(
                "error: this version of Ray decides differently whether to start Ray Client; update "
                "scripts/internal/start_ray.py"
            )
        for name in asked:
            setattr(scripts, name, _NO_CLIENT[name])
        scripts.main()


if __name__ == "__main__":
    sys.argv[0] = "ray"
    main()
