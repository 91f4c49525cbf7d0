"""The committed rules of operators' documents equal those extracted from the documents themselves."""

import subprocess
import sys
from pathlib import Path

from tests.npu_emulator.documented import FOLDER, RULES

RELEASES = ("8.5.0", "9.1.0")


def test_the_committed_rules_are_those_of_both_releases(upstream: Path):
    releases = [upstream / "cann-operators" / release for release in RELEASES]
    lacking = [str(folder / name) for folder in releases for name in ("ops-math", "ops-nn", "ops-transformer")
               if not (folder / name).is_dir()]  # fmt: skip
    assert not lacking, f"checkouts are missing: {lacking}"
    command = [sys.executable, FOLDER / "extract_rules.py", *releases, "--calls", *sorted(FOLDER.glob("*_calls*.txt"))]
    written = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert written == RULES.read_text()
