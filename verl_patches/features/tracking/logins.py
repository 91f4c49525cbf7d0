"""Checks whether a tracker would start without asking for a login, by its own variables and login files."""

from __future__ import annotations

import netrc
import os
from pathlib import Path


def has_variable(name: str, *values: str) -> bool:
    """Return whether a variable is set, to one of `values` if any are given."""
    given = os.environ.get(name, "")
    return given.lower() in values if values else bool(given)


def has_wandb_login() -> bool:
    """Return whether W&B has a key, a login for its server, or was told to stay offline."""
    offline = has_variable("WANDB_MODE", "offline", "disabled", "dryrun")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    return offline or has_variable("WANDB_API_KEY") or _netrc_knows(host, "~/.netrc", "~/_netrc")


def has_swanlab_login() -> bool:
    """Return whether SwanLab has a key, a login, or was told to stay on this machine."""
    stored = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser() / ".netrc"
    local = has_variable("SWANLAB_MODE", "local", "offline", "disabled")
    return local or has_variable("SWANLAB_API_KEY") or stored.exists()


def _netrc_knows(host: str, *files: str) -> bool:
    """Return whether one of the files, in netrc's format, has a login for `host`."""
    for file in (os.environ.get("NETRC", ""), *files):
        try:
            if file and netrc.netrc(str(Path(file).expanduser())).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
