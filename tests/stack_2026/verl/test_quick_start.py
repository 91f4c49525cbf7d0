"""verl's own Ascend quick start with the verl that is installed; its commands are those of a checkout, `verl-v0.9.0`.

`bash scripts/test.sh --stack 2026 tests/stack_2026/verl/test_quick_start.py --upstream FOLDER` runs all of it.
"""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rehearsal.environment import environment_of
from rehearsal.plan import ROOT
from rehearsal.quick_start import DATASET, MODEL, word_problems, write_dataset
from scripts import make_quick_start_files

CHECKOUT = "verl-v0.9.0"
PREPROCESS = "python3 examples/data_preprocess/gsm8k.py --local_dataset_path ~/hf_data/gsm8k/"


@dataclass(frozen=True)
class Example:
    """One of the quick start's scripts.

    Attributes:
        script: the command.
        dies: emulated ones.
        sizes: the script's own variables.
        keys: behind the script: what has no compiler here, and fewer processes.
        checkouts: for PYTHONPATH, of projects that no registry has.
    """

    script: str
    dies: int
    sizes: dict[str, str]
    keys: tuple[str, ...]
    checkouts: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """As it is typed, on one line."""
        return " ".join([self.script, *self.keys, *SMALL, f"ray_kwargs.ray_init.num_cpus={8 + 4 * self.dies}"])


SIZES = {"MAX_PROMPT_LENGTH": "128", "MAX_RESPONSE_LENGTH": "16", "TOTAL_TRAINING_STEPS": "2"}
SMALL = (
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
)
FSDP2 = Example(
    "bash tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_vllm_ascend.sh",
    dies=1,
    sizes=SIZES
    | {"NDEVICES_PER_NODE": "1", "ROLLOUT_TP": "1", "PPO_MAX_TOKEN_LEN_PER_GPU": "4096", "ACTOR_LR": "1e-4"},
    keys=(
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.use_torch_compile=False",
    ),
)
# Two stages of a pipeline, tensors over two dies in each.
MEGATRON = Example(
    "bash tests/special_npu/quick_start/run_qwen3_0_6b_megatron_vllm_ascend.sh",
    dies=4,
    sizes=SIZES | {"NDEVICES_PER_NODE": "4"},
    keys=(
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
    ),
    checkouts=("MindSpeed-core_r0.16.0", "Megatron-LM-core_r0.16.0"),
)


def test_answers_are_what_verl_reads_in_gsm8k():
    from verl.utils.reward_score.gsm8k import extract_solution

    problems = word_problems(200, seed=3)
    assert len({problem.question for problem in problems}) > 50
    for problem in problems:
        first, second = map(int, re.findall(r"\d", problem.question))
        assert extract_solution(problem.answer) == str(first + second)


def test_datasets_finds_the_configuration_main(tmp_path, monkeypatch):
    from datasets import load_dataset

    write_dataset(tmp_path / DATASET, seed=1)
    found = load_dataset(str(tmp_path / DATASET), "main", cache_dir=str(tmp_path / "cache"))
    assert {name: rows.column_names for name, rows in found.items()} == {
        "train": ["question", "answer"],
        "test": ["question", "answer"],
    }


def test_folder_that_cannot_be_written_rejected(tmp_path, capsys):
    (tmp_path / MODEL).mkdir(parents=True)
    assert make_quick_start_files.main(["--home", str(tmp_path)]) == 1
    assert "holds no tiny model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("example", [FSDP2, MEGATRON], ids=["fsdp2", "megatron"])
def test_quick_start_trains_on_emulated_dies(example, tmp_path, upstream):
    missing = [name for name in (CHECKOUT, *example.checkouts) if not (upstream / name).is_dir()]
    if missing:
        pytest.skip(f"NOT RUN: {upstream} lacks {' and '.join(missing)}")
    home, place = tmp_path / "home", tmp_path / "place"
    assert make_quick_start_files.main(["--home", str(home)]) == 0
    place.mkdir()
    for name in ("examples", "tests"):  # its folder `verl` is left away: the installed one is what runs
        (place / name).symlink_to(upstream / CHECKOUT / name)
    environment = {**os.environ, **environment_of("2026"), **example.sizes, "HOME": str(home)}
    environment |= {"NPU_EMULATOR_DEVICES": str(example.dies), "NPU_EMULATOR_CAPACITY_MB": "1024"}
    environment["ASCEND_VISIBLE_DEVICES"] = ",".join(map(str, range(example.dies)))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE", "PYTHONPATH", "RAY_ADDRESS"):
        environment.pop(name, None)
    if example.checkouts:
        paths = [str(upstream / name) for name in example.checkouts]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, str(ROOT)])
        # MindSpeed looks for a name in every module, and transformers warns of each that it then loads.
        environment |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["VERL_USE_EXTERNAL_MODULES"] = "verl_plugin.mindspeed"
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron-core asserts it
    environment["VERL_FILE_LOGGER_PATH"] = str(tmp_path / "metrics.jsonl")
    for command in (PREPROCESS, f"{example.command} trainer.logger=[console,file]"):
        with (tmp_path / "log").open("w") as log:
            ended = subprocess.run(
                ["bash", "-c", command], cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=1500
            )
        assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [row["data"] for row in rows if "actor/grad_norm" in row["data"]]
    assert len(trained) == 2 and all(math.isfinite(row["actor/grad_norm"]) for row in trained)
    assert any(row["critic/score/mean"] > 0 for row in trained), "the rewards are those of GSM8K"
    assert all(row["training/rollout_probs_diff_max"] < 0.05 for row in trained), "updated weights reach vLLM"


@pytest.mark.parametrize("example", [FSDP2, MEGATRON], ids=["fsdp2", "megatron"])
@pytest.mark.parametrize("page", ["ci-without-an-npu.md", "ci-without-an-npu.zh.md"])
def test_page_shows_the_commands_that_are_tested(page, example):
    joined = re.sub(r" \\\n +", " ", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert PREPROCESS in joined and example.command in joined
    assert all(f"{name}={value}" in joined for name, value in example.sizes.items())
