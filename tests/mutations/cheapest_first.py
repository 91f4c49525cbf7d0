"""Pytest plugin, `-p tests.mutations.cheapest_first`: runs cheap tests first, since a failure makes the rest needless.

Files are ordered by their measured cost, and tests marked as slow come last. The emulator's own tests still come before
all others, as tests/conftest.py requires.
"""

import pytest

from tests.fast_tier import LEFT_OUT, ROOT, file_of, measured

_EMULATOR = ROOT / "tests" / "npu_emulator"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests by cost; those of a file keep their order."""
    seconds = measured()

    def rank(item: pytest.Item) -> tuple[bool, bool, float]:
        slow = any(item.get_closest_marker(name) for name in LEFT_OUT)
        return not item.path.is_relative_to(_EMULATOR), slow, seconds.get(file_of(item), 0.0)

    items.sort(key=rank)
