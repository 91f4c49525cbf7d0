"""vLLM's own workers take weights from FSDP2 ranks on their dies, and generate the tokens that transformers does."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stack_2026.verl_plugin.worker_program import IMAGES, PROMPTS, TOKENS, UPDATES, Case
from tests.stack_2026.vllm_ascend.images_program import write_model
from tests.stack_2026.vllm_ascend.models import write_checkpoint

pytestmark = pytest.mark.slow
CASES = [
    # Absorbed weights of MLA, a dense layer and experts, through verl's bucket.
    Case("deepseek", cycles=50),
    # Experts over two dies, which are transposed on waking; verl hands over the staging memory itself.
    Case("qwen3moe", dies=2, experts_parallel=True, bucket=1),
    # A vision tower, whose heads and widths are sharded over the dies.
    Case(IMAGES, dies=2),
]
FORGETFUL = dataclasses.replace(CASES[0], cycles=0, keeps=False)
COPYING = dataclasses.replace(CASES[0], cycles=0, discards=False)
SHIFTED = dataclasses.replace(CASES[2], shifted=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of the workers of all cases."""
    made = tmp_path_factory.mktemp("workers")
    cases = [*CASES, FORGETFUL, COPYING, SHIFTED]
    for model in {case.model for case in cases} - {IMAGES}:
        write_checkpoint(model, made / model)
    write_model(IMAGES, made / IMAGES)
    command = [sys.executable, "-m", "tests.stack_2026.verl_plugin.worker_program", str(made)]
    command += [json.dumps(dataclasses.asdict(case)) for case in cases]
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
    assert all_expected[0] != all_expected[1]  # exposes weights that were not received


@pytest.mark.parametrize("update", range(UPDATES))
def test_weights_with_a_vision_tower_are_those_vllm_loads(folder, update):
    """Compare bit for bit, and check that a worker that writes a shard 16 bytes off reports it."""
    assert [worker["differing"] for worker in served(folder, CASES[2], update)] == [[], []]
    errors = [(folder / f"{SHIFTED.name}.{die}.error").read_text() for die in range(SHIFTED.dies)]
    assert "weights differ from training's after update 1: visual.patch_embed.proj.weight" in errors[0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_addresses_of_live_weights_stay(folder, case):
    before, after = (served(folder, case, update) for update in range(UPDATES))
    assert [worker["addresses"] for worker in before] == [worker["addresses"] for worker in after]


def test_random_weights_are_not_sampled_from(folder):
    for worker in served(folder, CASES[0], 0):
        assert "the rollout weights are incomplete" in worker["refusal"]


# The vision-language model's position tables, which no update writes, are larger here than its weights.
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.model)
def test_a_worker_that_sleeps_copies_next_to_nothing(folder, case):
    before, after = ([worker["copied"] for worker in served(folder, case, update)] for update in range(UPDATES))
    weights = [worker["weights"] for worker in served(folder, case, 0)]
    # Before the first update it is unknown what updates write, so upstream's sleep copies everything.
    assert all(copied > size for copied, size in zip(before, weights, strict=True))
    assert all(0 < copied < size for copied, size in zip(after, weights, strict=True))
    assert all(copied < whole / 3 for copied, whole in zip(after, before, strict=True))


def test_switched_off_all_is_copied(folder):
    worker = served(folder, COPYING, 1)[0]
    assert worker["copied"] > worker["weights"]
    assert worker["tokens"] == json.loads((folder / f"{COPYING.name}.1.expected").read_text())


def test_without_what_no_update_writes_tokens_are_others(folder):
    worker = served(folder, FORGETFUL, 1)[0]
    assert worker["tokens"] != json.loads((folder / f"{FORGETFUL.name}.1.expected").read_text())


def test_fifty_cycles_take_no_memory(folder):
    memory = json.loads((folder / f"{CASES[0].name}.0.memory.json").read_text())
    assert len(memory) == 50
    assert memory == memory[:1] * 50  # bytes that torch has allocated and reserved, and free bytes on the die
