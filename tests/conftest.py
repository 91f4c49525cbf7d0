"""The order of the tests."""

from pathlib import Path

import pytest

EMULATOR = Path(__file__).parent / "npu_emulator"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the emulator's own tests first: others import Megatron, and with it hand torch.cuda over to the NPU."""
    items.sort(key=lambda item: not item.path.is_relative_to(EMULATOR))
