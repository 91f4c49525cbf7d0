#!/usr/bin/env python3
"""Print standard input with all secrets masked; launchers use it for their settings and commands."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from post_training.masking import masked_text  # noqa: E402

if __name__ == "__main__":
    text = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
    sys.stdout.buffer.write(masked_text(text).encode("utf-8", errors="surrogateescape"))
