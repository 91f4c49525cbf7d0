#!/usr/bin/env python3
"""Puts a rehearsal's output into README.md and README.zh.md as their sample run, dated to the patches that it applied.

bash scripts/rehearse.sh | tee rehearsal.txt; python scripts/internal/update_readme_sample.py rehearsal.txt
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("Done in", "reward", "seconds a step", "start-up", "weights", "patches")
BEGINS = {"README.md": "## What it printed\n", "README.zh.md": "## 它的输出\n"}
INTRODUCTIONS = {
    "README.md": (
        "A second run (environment and checkpoint made before) on 2 otherwise idle cores, when the overlay had "
        "{patches} patches:"
    ),
    "README.zh.md": "第二次运行（环境与 checkpoint 已就绪），机器有 2 个空闲核，overlay 当时有 {patches} 个补丁：",
}
END = "\n`outputs/rehearsal/latest/report.png`"


class SampleError(ValueError):
    """The output is not that of a whole rehearsal."""


def sample(output: str, root: Path) -> tuple[str, int]:
    """What README.md shows of a rehearsal's output, with paths inside `root` relative, and its number of patches.

    Of the steps these are the first and the last, and of the summary the lines that stand for themselves.

    Raises:
        SampleError: the rehearsal did not end, or patches had no effect.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output).replace(f"{root}/", "")
    steps = re.search(r"^ +step  reward .*?(?=^$)", plain, re.MULTILINE | re.DOTALL)
    summary = re.search(r"^Done in .*?^ +files +\S+$", plain, re.MULTILINE | re.DOTALL)
    if steps is None or summary is None:
        raise SampleError("this is not the output of a rehearsal that came to its end")
    patches = re.search(r"patches +(\d+) applied, (\d+) effective", summary[0])
    if patches is None or patches[1] != patches[2]:
        raise SampleError("this rehearsal does not say that all of its patches had an effect")
    title, first, *_, last = steps[0].splitlines()
    lines = [title, first, "    ...", last, "", *_entries(summary[0], SHOWN)]
    return "\n".join(lines), int(patches[1])


def _entries(summary: str, names: Sequence[str]) -> Iterator[str]:
    """The lines of the summary's entries that begin with one of `names`, with those that continue them."""
    entries = re.split(r"\n(?=  \w)", summary)
    return (entry for entry in entries if entry.strip().startswith(tuple(names)))


def with_sample(readme: str, text: str, patches: int) -> str:
    """README.md or README.zh.md with the sample replaced."""
    name = next(name for name, begin in BEGINS.items() if begin in readme)
    before, begin, rest = readme.partition(BEGINS[name])
    _, end, after = rest.partition(END)
    indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"{before}{begin}\n{INTRODUCTIONS[name].format(patches=patches)}\n\n{indented}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Rewrites the README of both languages; 2 if the output cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="what scripts/rehearse.sh printed")
    options = parser.parse_args(arguments)
    try:
        text, patches = sample(options.output.read_text(), ROOT)
    except SampleError as error:
        print(f"error: {options.output}: {error}", file=sys.stderr)
        return 2
    for name in BEGINS:
        (ROOT / name).write_text(with_sample((ROOT / name).read_text(), text, patches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
