"""Training's attention rejects what the rollout's does not compute, where a job skips the check."""

from __future__ import annotations

import json
import os
import subprocess

from tests import forked


def test_attention_that_is_not_the_rollouts_rejected():
    program = "tests.stack_2026.batch_invariance.attention_program"
    process = forked.start(forked.PYTORCH, program, environment=os.environ, stdout=subprocess.PIPE)
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    said = json.loads(printed.splitlines()[-1])
    assert said["dropout"].startswith("attention_dropout is invalid")
    assert "this attention, of images, is not causal" in said["asked"] and said["module"] == said["asked"]
    assert "batch_invariant needs whole sequences" in said["part"]
