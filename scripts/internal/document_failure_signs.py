"""Write the table of messages into docs/failure-signs.md and its Chinese version, between the two marks there.

`python -m overlay update` runs it.
"""

import sys
from pathlib import Path

from post_training.recovery.policy import Policy
from post_training.recovery.signs import SIGNS, Sign

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "failure-signs.md", ROOT / "docs" / "failure-signs.zh.md")
_BEGIN, _END = "<!-- signs -->\n", "<!-- end of signs -->\n"
_LONGEST = 150


def written(page: str) -> str:
    """Return the text of a page with the table between its marks."""
    before, _, rest = page.partition(_BEGIN)
    head = rest.partition("|---|")[0]
    _, _, after = rest.partition(_END)
    rows = "".join(f"| {' | '.join(_cells(sign))} |\n" for sign in SIGNS)
    return f"{before}{_BEGIN}{head}|---|---|---|---|\n{rows}{_END}{after}"


def _cells(sign: Sign) -> tuple[str, str, str, str]:
    example = sign.example if len(sign.example) <= _LONGEST else f"{sign.example[:_LONGEST]}..."
    source = sign.source
    if "://" in source:
        place = source.removeprefix("https://").removeprefix("github.com/")
        shown = place if len(place) < 50 else place.partition("/")[0]
        source = f"[{shown}]({source})"
    else:
        source = f"`{source}`"
    # A message that contains backticks needs double ones around it.
    quoted = example.replace("|", "\\|")
    marks = "``" if "`" in quoted else "`"
    return f"{marks}{quoted}{marks}", f"`{sign.cause}`", f"`{Policy().actions[sign.cause]}`", source


def main() -> int:
    """Write both pages and return the exit code."""
    for page in PAGES:
        page.write_text(written(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
