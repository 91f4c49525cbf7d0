#!/usr/bin/env python3
"""Turns GSM8K into train.parquet and test.parquet for verl.

The same command as verl's script of this name, and the same prompts and columns. Without --local_dataset_path the data
set comes from the hub, or from the cache of its client; with it no hub is asked.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.internal.preprocess_dataset import Published, preprocess  # noqa: E402

GSM8K = Published(
    name="openai/gsm8k",
    modelscope="AI-ModelScope/gsm8k",
    instruction='Let\'s think step by step and output the final answer after "####".',
    local_dir="~/data/gsm8k",
)

if __name__ == "__main__":
    sys.exit(preprocess(GSM8K))
