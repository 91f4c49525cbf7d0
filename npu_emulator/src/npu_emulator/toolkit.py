"""Variables that set_env.sh of CANN and of its transformer library set, for code that only asks whether they are."""

import os
from pathlib import Path

# Anything that exists will do: whoever needs a file of CANN is told by its absence.
_PLACE = str(Path(__file__).parent)
VARIABLES = {"ASCEND_HOME_PATH": _PLACE, "ATB_HOME_PATH": _PLACE}


def announce() -> None:
    """Set the variables that are not set."""
    for name, place in VARIABLES.items():
        os.environ.setdefault(name, place)
