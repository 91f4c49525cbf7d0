"""The order of the tests, and emulated dies of their own."""

import os
from pathlib import Path

import pytest

# Processes of a node share the memory of its dies; no other run on this machine is to take part.
os.environ["NPU_EMULATOR_NODE"] = f"tests-{os.getpid()}"

EMULATOR = Path(__file__).parent / "npu_emulator"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the emulator's own tests first: others import Megatron, and with it hand torch.cuda over to the NPU."""
    items.sort(key=lambda item: not item.path.is_relative_to(EMULATOR))
