"""Turns the emulator's stricter modes off for its own tests, in this process and in those that they start."""

import os
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
