"""Count the answers that scored 0 without a result, by reason; a run logs the counts as metrics of each step."""

import threading
from collections import Counter

RULE_ERRORS = "reward/rule_errors"
"""A rule raised an exception: a defect of this package, and a warning in the run's faults."""
TIMED_OUT = "reward/timed_out"
"""The algebra took longer than the time limit of one comparison."""
LOST = "reward/lost"
"""The algebra ended its process: out of memory, or a stack overflow in C."""
OVER_BUDGET = "reward/over_budget"
"""The batch had spent its time on other slow comparisons."""
ALL = (RULE_ERRORS, TIMED_OUT, LOST, OVER_BUDGET)

_lock = threading.Lock()
_counted: Counter[str] = Counter()


def add(reason: str) -> None:
    """Count one answer."""
    with _lock:
        _counted[reason] += 1


def take() -> dict[str, int]:
    """Return the counts of this process since the last call, one for every reason."""
    with _lock:
        taken = {reason: _counted[reason] for reason in ALL}
        _counted.clear()
    return taken
