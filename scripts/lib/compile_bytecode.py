"""Compile the bytecode of the installed packages, where a rehearsal may import it.

Workers that import the stack at once would all compile it. Tests, models that are not used and tools are nearly half of
what is installed: Python compiles those of their modules that are imported.
"""

from __future__ import annotations

import compileall
import re
import sysconfig

_LEFT_OUT = (
    r"/(.*/)?(tests?|testing|transformers/models|ray/(rllib|tune|train|data|serve|llm)|sympy/(physics|stats)|mypy|mypyc"
    r"|sqlalchemy|pip|matplotlib|fontTools|tensorboard|alembic|optuna)/"
)


def main() -> None:
    """Compile; files that are no Python of this version stay as they are."""
    packages = sysconfig.get_path("purelib")
    compileall.compile_dir(packages, quiet=2, rx=re.compile(re.escape(packages) + _LEFT_OUT), workers=0)


if __name__ == "__main__":
    main()
