"""The emulator's own tests begin with none of its stricter modes, in this process and in those that they start."""

import os
from collections.abc import Iterator

import pytest

from tests.conftest import MODES


@pytest.fixture(scope="package", autouse=True)
def plain_emulator() -> Iterator[None]:
    """Tests of the modes switch them on themselves; the others also call operators as no real NPU would allow."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODES:
            if name in os.environ:
                patch.delenv(name)
        yield
