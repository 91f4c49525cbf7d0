"""vLLM's own workers take weights from FSDP2 ranks on their dies: what they generate is what transformers does."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stack_2026.verl_plugin.worker_program import PROMPTS, TOKENS, UPDATES, Case
from tests.stack_2026.vllm_ascend.models import write_checkpoint

pytestmark = pytest.mark.slow
CASES = [
    # Absorbed weights of MLA, a dense layer, experts; through verl's bucket.
    Case("deepseek"),
    # Experts over two dies, which are awoken transposed; verl hands the staging memory itself over.
    Case("qwen3moe", dies=2, experts_parallel=True, bucket=1),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of all cases wrote what they generated."""
    made = tmp_path_factory.mktemp("workers")
    for model in {case.model for case in CASES}:
        write_checkpoint(model, made / model)
    command = [sys.executable, "-m", "tests.stack_2026.verl_plugin.worker_program", str(made)]
    command += [json.dumps(dataclasses.asdict(case)) for case in CASES]
    environment = os.environ | {"NPU_EMULATOR_DEVICES": "2"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-5000:]
    return made


def served(folder: Path, case: Case, update: int) -> list[dict[str, Any]]:
    names = [f"{case.name}.{die}.{update}.json" for die in range(case.dies)]
    return [json.loads((folder / name).read_text()) for name in names]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_tokens_after_each_update_are_those_of_transformers(folder, case):
    all_expected = [json.loads((folder / f"{case.name}.{update}.expected").read_text()) for update in range(UPDATES)]
    for update, expected in enumerate(all_expected):
        assert [len(tokens) for tokens in expected] == [TOKENS] * len(PROMPTS)
        assert [worker["tokens"] for worker in served(folder, case, update)] == [expected] * case.dies
    assert all_expected[0] != all_expected[1]  # weights that did not arrive would show


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_addresses_of_live_weights_stay(folder, case):
    before, after = (served(folder, case, update) for update in range(UPDATES))
    assert [worker["addresses"] for worker in before] == [worker["addresses"] for worker in after]


def test_random_weights_are_not_sampled_from(folder):
    for worker in served(folder, CASES[0], 0):
        assert "the rollout weights are not whole" in worker["refusal"]
