"""The micro batch benchmark: its inputs and output, and that all methods give the same loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.update_batches import PROMPT, RESPONSE, WAYS, Turn, batch_of, largest_of, report

ROOT = Path(__file__).resolve().parents[2]


def test_lengths_are_gsm8ks_and_the_largest_micro_batch_is_found():
    mask = batch_of(512).batch["attention_mask"]
    lengths = mask.sum(-1).float()
    assert mask.shape == (512, PROMPT + RESPONSE)
    assert lengths.mean().item() == pytest.approx(143, rel=0.05) and lengths.std().item() == pytest.approx(59, rel=0.1)
    batch = batch_of(8)
    whole = batch.batch["attention_mask"].sum(-1).tolist()
    assert largest_of(batch, 4) == max(sum(whole[:4]), sum(whole[4:])) and largest_of(batch, 1) == max(whole)


def test_the_ratio_is_of_neighbouring_turns(capsys):
    seconds = dict.fromkeys(WAYS, (2.0, 4.0, 1.0)) | {"by tokens": (1.0, 1.0, 1.0)}
    report([Turn(way, 1.0, seconds[way][turn], 4, 0.0) for turn in range(3) for way in WAYS])
    by_way = {line[:15].strip(): line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert by_way == {"fixed, padded": "1.00", "fixed": "1.00", "by tokens": "0.50"}


@pytest.mark.slow
def test_the_ways_have_one_loss_and_other_micro_batches(tmp_path):
    line = [sys.executable, "benchmarks/update_batches.py", "--sequences", "32", "--fixed", "2", "--turns", "1"]
    ended = subprocess.run(
        [*line, "--json", str(tmp_path / "results.json")],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    turns = json.loads((tmp_path / "results.json").read_text())
    assert [turn["way"] for turn in turns] == list(WAYS)
    padded, fixed, by_tokens = (turn["micro_batches"] for turn in turns)
    assert padded == fixed == 16 > by_tokens
    assert [turn["loss"] for turn in turns] == pytest.approx([turns[0]["loss"]] * 3, rel=1e-5)


def test_indivisible_batch_rejected_in_one_line():
    line = [sys.executable, "benchmarks/update_batches.py", "--sequences", "6", "--fixed", "4"]
    ended = subprocess.run(line, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr == "error: --fixed=4 does not divide --sequences=6; see --help\n"
