"""Turns the emulator's stricter modes off for its own tests, in this process and in those that they start."""

import os
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import MODES


@pytest.fixture(scope="package", autouse=True)
def plain_emulator() -> Iterator[None]:
    """Tests of the modes switch them on themselves; others also make calls that no real NPU would allow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODES:
            if name in os.environ:
                patch.delenv(name)
        yield
        # Operators that no test waits for must run before the modes are on again.
        if "torch_npu" in sys.modules and sys.modules["torch_npu"].npu.is_initialized():
            sys.modules["torch_npu"].npu.synchronize()
