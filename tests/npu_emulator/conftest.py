"""The emulator's own tests begin with none of its stricter modes, in this process and in those that they start."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def plain_emulator() -> Iterator[None]:
    """Tests of the modes switch them on themselves; the others also call operators as no real NPU would allow."""
    from npu_emulator import collectives, strict

    with pytest.MonkeyPatch.context() as patch, strict.enabled(False), collectives.deferred(False):
        for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_DEFERRED_COLLECTIVES"):
            if name in os.environ:
                patch.delenv(name)
        yield
