"""Compile the installed packages to bytecode, as far as a rehearsal may import them.

Workers that start together would each compile what they import. Tests, tools and models that are not used are nearly
half of what is installed; Python compiles their modules when one is imported.
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
    """Compile the packages; a file that this version of Python cannot read stays as it is."""
    packages = sysconfig.get_path("purelib")
    compileall.compile_dir(packages, quiet=2, rx=re.compile(re.escape(packages) + _LEFT_OUT), workers=0)


if __name__ == "__main__":
    main()
