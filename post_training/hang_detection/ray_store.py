"""Heartbeats by way of Ray's key-value store, which every process of a job reaches on whichever node it runs.

The store is Ray's own (`ray.experimental.internal_kv`) and lives in the head's control process, so no process has to be
placed for it, and none of it can be what hangs. One key per process, overwritten by every sign.
"""

from __future__ import annotations

from collections.abc import Iterator

_PREFIX = "sign-of-life-"
_SETTINGS = "settings-of-heartbeats"


class RayStore:
    """The signs of the Ray job of this process. Made in the main thread; any thread may use it."""

    def __init__(self) -> None:
        import ray

        self._namespace = f"watch-{ray.get_runtime_context().get_job_id()}"

    def send(self, name: str, content: bytes) -> None:
        """Replace the newest sign of the process `name`."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(_PREFIX + name, content, overwrite=True, namespace=self._namespace)

    def received(self) -> Iterator[bytes]:
        """The newest sign of every process."""
        from ray.experimental import internal_kv

        for key in internal_kv._internal_kv_list(_PREFIX, namespace=self._namespace):
            content = internal_kv._internal_kv_get(key, namespace=self._namespace)
            if content is not None:
                yield content

    def keep_settings(self, content: bytes) -> None:
        """Keep what processes of this job that start later read with `settings`."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(_SETTINGS, content, overwrite=True, namespace=self._namespace)

    def settings(self) -> bytes | None:
        """The settings that the driver stored; None before it has."""
        from ray.experimental import internal_kv

        found: bytes | None = internal_kv._internal_kv_get(_SETTINGS, namespace=self._namespace)
        return found

    def clear(self) -> None:
        """Forget all signs: the store outlives the job where the Ray does."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(_PREFIX, del_by_prefix=True, namespace=self._namespace)
