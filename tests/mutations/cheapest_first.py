"""A plugin of pytest, `-p tests.mutations.cheapest_first`: what costs little is asked first, and may spare the rest.

The order is that of what each file was measured to cost; a test that is marked as slow comes after all that are not.
The emulator's own tests stay before the others, as tests/conftest.py wants them.
"""

import pytest

from tests.fast_tier import LEFT_OUT, ROOT, file_of, measured

_EMULATOR = ROOT / "tests" / "npu_emulator"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests into that order; those of a file keep theirs."""
    seconds = measured()

    def rank(item: pytest.Item) -> tuple[bool, bool, float]:
        slow = any(item.get_closest_marker(name) for name in LEFT_OUT)
        return not item.path.is_relative_to(_EMULATOR), slow, seconds.get(file_of(item), 0.0)

    items.sort(key=rank)
