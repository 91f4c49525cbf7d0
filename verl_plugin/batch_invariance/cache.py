"""vLLM's cache folder for one engine."""

from __future__ import annotations

import os
from pathlib import Path


def make_cache(folder: Path) -> Path:
    """Make a cache folder in which compiled graphs are the engine's own, and return it.

    Facts about model classes are shared with the user's cache. Without them, vLLM starts a process for each engine that
    imports the model's class and everything it needs.
    """
    users = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm"))
    shared = users.expanduser().absolute() / "modelinfos"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / shared.name).symlink_to(shared)
    return folder
