"""verl's own Ascend quick start, with commands from the checkout `verl-v0.9.0` and the installed verl.

`bash scripts/test.sh --stack 2026 tests/stack_2026/verl/test_quick_start.py --upstream FOLDER` runs all of it.
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rehearsal.environment import environment_of
from rehearsal.plan import ROOT
from rehearsal.quick_start import DATASET, MODEL, word_problems, write_dataset
from scripts import make_quick_start_files

CHECKOUT = "verl-v0.9.0"
PREPROCESS = "python3 examples/data_preprocess/gsm8k.py --local_dataset_path ~/hf_data/gsm8k/"
TRAIN = "bash tests/special_npu/quick_start/run_qwen3_0_6b_fsdp2_vllm_ascend.sh"
# The script's own variables and additional keys, which set sizes and disable parts that need a compiler.
SIZES = {
    "NDEVICES_PER_NODE": "1",
    "ROLLOUT_TP": "1",
    "MAX_PROMPT_LENGTH": "128",
    "MAX_RESPONSE_LENGTH": "16",
    "PPO_MAX_TOKEN_LEN_PER_GPU": "4096",
    "TOTAL_TRAINING_STEPS": "2",
    "ACTOR_LR": "1e-4",
}
KEYS = (
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.ref.use_torch_compile=False",
    "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=64",
    "ray_kwargs.ray_init.num_cpus=12",
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
    assert "is not a tiny model" in capsys.readouterr().err


@pytest.mark.slow
def test_quick_start_trains_on_an_emulated_die(tmp_path, pytestconfig):
    upstream = pytestconfig.getoption("upstream")
    if upstream is None:
        pytest.skip("needs --upstream FOLDER with a checkout of verl's tag v0.9.0 as verl-v0.9.0")
    home, place = tmp_path / "home", tmp_path / "place"
    assert make_quick_start_files.main(["--home", str(home)]) == 0
    place.mkdir()
    for name in ("examples", "tests"):  # not its `verl` folder: the installed verl must run
        (place / name).symlink_to(Path(upstream, CHECKOUT, name).resolve())
    environment = {**os.environ, **environment_of("2026"), **SIZES, "HOME": str(home)}
    environment |= {"NPU_EMULATOR_DEVICES": "1", "NPU_EMULATOR_CAPACITY_MB": "1024", "ASCEND_VISIBLE_DEVICES": "0"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in ("NPU_EMULATOR_STRICT", "NPU_EMULATOR_NODE", "PYTHONPATH", "RAY_ADDRESS"):
        environment.pop(name, None)
    environment["VERL_FILE_LOGGER_PATH"] = str(tmp_path / "metrics.jsonl")
    logger = "trainer.logger=[console,file]"
    for command in (PREPROCESS, " ".join([TRAIN, *KEYS, logger])):
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


def test_page_shows_the_commands_that_are_tested():
    for page in ("ci-without-an-npu.md", "ci-without-an-npu.zh.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        joined = re.sub(r" \\\n +", " ", text)
        assert PREPROCESS in joined and TRAIN in joined, page
        assert all(f"{name}={value}" in joined for name, value in SIZES.items()), page
        assert all(key in joined for key in KEYS), page
