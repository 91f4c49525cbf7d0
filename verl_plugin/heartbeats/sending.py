"""Starts heartbeats in a process of the Ray job, if the job's trainer asks for them."""

from __future__ import annotations

from pathlib import Path

from post_training.hang_detection.calls import CallsOfStalledRank
from post_training.hang_detection.signs import start_sending
from verl_plugin.heartbeats.settings import HangDetection


def start(name: str) -> None:
    """Send heartbeats from now on under this name; only the first call of a process counts.

    Args:
        name: a rank's number, or a name for another process. Ranks also record their collectives.
    """
    import ray

    from post_training.hang_detection.ray_store import RayStore

    if not ray.is_initialized():
        return
    store = RayStore()
    content = store.settings()
    if content is None:
        return
    settings, send = HangDetection.unpacked(content), store.send
    if name.isdigit():
        send = CallsOfStalledRank(send, int(name), Path(settings.folder), settings.calls_after_s)
    start_sending(name, settings.interval_s, send)
