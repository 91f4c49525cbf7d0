"""Send heartbeats through Ray's key-value store, which every process of a job reaches on whichever node it runs.

The store is Ray's own (`ray.experimental.internal_kv`) and lives in the head's control process, so it needs no process
of ours, which could hang itself. It has one key per process, overwritten by every heartbeat.
"""

from __future__ import annotations

from collections.abc import Iterator

_PREFIX = "sign-of-life-"
_SETTINGS = "settings-of-heartbeats"


class RayStore:
    """The heartbeats of this process's Ray job. Create it in the main thread; any thread may use it."""

    def __init__(self) -> None:
        import ray

        self._namespace = f"watch-{ray.get_runtime_context().get_job_id()}"

    def send(self, name: str, content: bytes) -> None:
        """Replace the newest heartbeat of the process `name`."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(_PREFIX + name, content, overwrite=True, namespace=self._namespace)

    def received(self) -> Iterator[bytes]:
        """Yield the newest heartbeat of every process."""
        from ray.experimental import internal_kv

        for key in internal_kv._internal_kv_list(_PREFIX, namespace=self._namespace):
            content = internal_kv._internal_kv_get(key, namespace=self._namespace)
            if content is not None:
                yield content

    def keep_settings(self, content: bytes) -> None:
        """Store the settings; processes of this job that start later read them with `settings`."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_put(_SETTINGS, content, overwrite=True, namespace=self._namespace)

    def settings(self) -> bytes | None:
        """Return the settings that the driver stored; None before it has."""
        from ray.experimental import internal_kv

        found: bytes | None = internal_kv._internal_kv_get(_SETTINGS, namespace=self._namespace)
        return found

    def clear(self) -> None:
        """Delete all heartbeats: the store outlives the job if Ray does."""
        from ray.experimental import internal_kv

        internal_kv._internal_kv_del(_PREFIX, del_by_prefix=True, namespace=self._namespace)
