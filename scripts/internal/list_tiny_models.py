#!/usr/bin/env python3
"""Print the families of tiny models for `rehearse.sh --model`, which runs before there is a Python environment.

`python -m overlay update` runs it.
"""

from rehearsal.tiny_model.architecture import TINY_MODELS

if __name__ == "__main__":
    print(*sorted(TINY_MODELS))
