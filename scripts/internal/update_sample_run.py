#!/usr/bin/env python3
"""Put a rehearsal into the documents as their sample run: its output into docs/rehearsal.md, its picture beside it.

bash scripts/rehearse.sh | tee rehearsal.txt; python scripts/internal/update_sample_run.py rehearsal.txt
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("Done in", "reward", "seconds a step", "start-up", "weights", "patches")
PICTURE = ROOT / "docs" / "sample_run.png"
BEGINS = {"docs/rehearsal.md": "## What it prints\n", "docs/rehearsal.zh.md": "## 它的输出\n"}
INTRODUCTIONS = {
    "docs/rehearsal.md": (
        "A second run (environment and checkpoint made before) on 2 cores, when the overlay had {patches} patches:"
    ),
    "docs/rehearsal.zh.md": "第二次运行（环境与 checkpoint 已就绪），2 个核，overlay 当时有 {patches} 个补丁：",
}
END = "\n`outputs/rehearsal/latest/report.png`"


class SampleError(ValueError):
    """The output is not that of a whole rehearsal."""


def sample(output: str, root: Path) -> tuple[str, int]:
    """Return the part of a rehearsal's output that the documents show, with paths relative to `root`, and its patches.

    The part has the first and the last step, and those lines of the summary that are clear without context.

    Raises:
        SampleError: the rehearsal did not end, or patches had no effect.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output).replace(f"{root}/", "")
    steps = re.search(r"^ +step  reward .*?(?=^$)", plain, re.MULTILINE | re.DOTALL)
    summary = re.search(r"^Done in .*?^ +files +\S+$", plain, re.MULTILINE | re.DOTALL)
    if steps is None or summary is None:
        raise SampleError("this is not the output of a completed rehearsal")
    patches = re.search(r"patches +(\d+) applied, (\d+) effective", summary[0])
    if patches is None or patches[1] != patches[2]:
        raise SampleError("this rehearsal does not report that all of its patches had an effect")
    title, first, *_, last = steps[0].splitlines()
    lines = [title, first, "    ...", last, "", *_entries(summary[0], SHOWN)]
    return "\n".join(lines), int(patches[1])


def _entries(summary: str, names: Sequence[str]) -> Iterator[str]:
    """Return the summary's entries that begin with one of `names`, including their continuation lines."""
    entries = re.split(r"\n(?=  \w)", summary)
    return (entry for entry in entries if entry.strip().startswith(tuple(names)))


def picture(output: str) -> Path:
    """Return the picture of the rehearsal that printed `output`.

    Raises:
        SampleError: the rehearsal did not end, or its folder is gone.
    """
    folder = re.search(r"^ +files +(\S+)$", output, re.MULTILINE)
    if folder is None or not (found := Path(folder[1]) / "report.png").is_file():
        raise SampleError("the folder of this rehearsal has no report.png")
    return found


def with_sample(page: str, text: str, patches: int) -> str:
    """Replace the sample of docs/rehearsal.md or of its Chinese sister."""
    name = next(name for name, begin in BEGINS.items() if begin in page)
    before, begin, rest = page.partition(BEGINS[name])
    _, end, after = rest.partition(END)
    indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
    return f"{before}{begin}\n{INTRODUCTIONS[name].format(patches=patches)}\n\n{indented}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Rewrite the pages of both languages and the picture; 2 if the output cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="output of scripts/rehearse.sh")
    options = parser.parse_args(arguments)
    try:
        output = options.output.read_text()
        text, patches = sample(output, ROOT)
        drawn = picture(output)
    except SampleError as error:
        print(f"error: {options.output}: {error}", file=sys.stderr)
        return 2
    for name in BEGINS:
        (ROOT / name).write_text(with_sample((ROOT / name).read_text(), text, patches))
    shutil.copyfile(drawn, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
