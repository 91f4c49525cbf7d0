#!/usr/bin/env python3
"""Puts a rehearsal's output into README.md as its sample run, dated to the number of patches that it applied.

bash scripts/rehearse.sh | tee rehearsal.txt; python scripts/internal/update_readme_sample.py rehearsal.txt
"""

import argparse
import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "## What it printed\n", "\n`outputs/rehearsal/latest/report.png`"


class SampleError(ValueError):
    """The output is not that of a whole rehearsal."""


def sample(output: str, root: Path) -> tuple[str, int]:
    """The part of a rehearsal's output that README.md shows, with paths inside `root` relative, and its patches.

    Raises:
        SampleError: the rehearsal did not end, or patches had no effect.
    """
    shown = re.search(r"^Making the parquet files.*?^ +files +\S+$", output, re.MULTILINE | re.DOTALL)
    if shown is None:
        raise SampleError("this is not the output of a rehearsal that came to its end")
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown[0]).replace(f"{root}/", "")
    patches = re.search(r"patches +(\d+) applied, (\d+) effective", text)
    if patches is None or patches[1] != patches[2]:
        raise SampleError("this rehearsal does not say that all of its patches had an effect")
    return text, int(patches[1])


def with_sample(readme: str, text: str, patches: int) -> str:
    """README.md with the sample replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    intro = (
        "A second run (environment and checkpoint made before) on 2 otherwise idle cores, when the overlay had "
        f"{patches} patches:"
    )
    return f"{before}{begin}\n{intro}\n\n{indented}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Rewrites README.md; 2 if the output cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="what scripts/rehearse.sh printed")
    options = parser.parse_args(arguments)
    try:
        text, patches = sample(options.output.read_text(), README.parent)
    except SampleError as error:
        print(f"error: {options.output}: {error}", file=sys.stderr)
        return 2
    README.write_text(with_sample(README.read_text(), text, patches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
