"""The order of the tests, which of them run only when they are asked for, and emulated dies of their own."""

import os
from pathlib import Path

import pytest

# Processes of a node share the memory of its dies; no other run on this machine is to take part.
os.environ["NPU_EMULATOR_NODE"] = f"tests-{os.getpid()}"

EMULATOR = Path(__file__).parent / "npu_emulator"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that take many minutes too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the emulator's own tests first: others import Megatron, and with it hand torch.cuda over to the NPU."""
    items.sort(key=lambda item: not item.path.is_relative_to(EMULATOR))
    if not config.getoption("exhaustive"):
        skipped = pytest.mark.skip(reason="takes many minutes; --exhaustive runs it")
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(skipped)
