"""The launchers of the stack 2026 with a stub for python3: their commands in order, and their rejections."""

from __future__ import annotations

import re

import pytest

from post_training.checkpoint.complete_files import write_complete
from tests.scripts.test_documents import commands
from tests.scripts.test_one_node import ONE_CARD, PROBLEMS, ROOT, machine, words

__all__ = ["machine"]  # a fixture of the other file

QWEN3 = {
    "qwen3_0_6b_gsm8k_one_card": ROOT / "scripts" / "train_qwen3_0_6b_gsm8k_one_card.sh",
    "qwen3_30b_a3b_gsm8k_one_node": ROOT / "scripts" / "train_qwen3_30b_a3b_gsm8k_one_node.sh",
}
SMALL = QWEN3["qwen3_0_6b_gsm8k_one_card"]
REWARD = ROOT / "verl_patches" / "utils" / "reward" / "rule_reward.py"


@pytest.mark.parametrize("job", QWEN3)
def test_job_is_planned_with_all_its_keys_and_then_verl_trains(machine, tmp_path, job):
    """The plan checks the job."""
    ended, calls = machine(QWEN3[job], "--steps", "7", "--", "trainer.save_freq=5", NPUS="16")
    assert ended.returncode == 0, ended.stderr
    convert, plan, train = map(words, calls)
    assert convert[0] == "scripts/json_to_parquet.py"
    assert plan[:3] == ["scripts/plan.py", "--config-name", job] and plan[plan.index("--stack") + 1] == "2026"
    own = [
        f"actor_rollout_ref.model.path='{tmp_path}/a model'",
        f"data.train_files=['{tmp_path}/out/data/train.parquet']",
        f"data.val_files=['{tmp_path}/out/data/test.parquet']",
        f"reward.custom_reward_function.path='{REWARD}'", "reward.custom_reward_function.name=compute_score",
        f"trainer.default_local_dir='{tmp_path}/out/checkpoints'",
        "trainer.total_training_steps=7", "trainer.save_freq=5",
    ]  # fmt: skip
    assert plan[plan.index("--cluster") + 2 : -2] == own
    folder = f"--config-path={ROOT}/verl_plugin/config"
    assert train[:5] == [
        "-m",
        "verl.trainer.main_ppo",
        folder,
        f"--config-name={job}",
        f"hydra.run.dir='{tmp_path}/out/hydra'",
    ]
    assert train[5:-2] == own


def test_dry_run_prints_the_same_commands_as_a_run(machine, tmp_path):
    shown, calls = machine(SMALL, "--dry-run", "--", "data.train_batch_size=8")
    assert shown.returncode == 0 and not calls and not (tmp_path / "out").exists()
    lines = [line.removeprefix("run ") for line in shown.stdout.splitlines() if line.startswith("run ")]
    _, (convert, _, train) = machine(SMALL, "--", "data.train_batch_size=8")
    assert [words(line)[1:] for line in lines] == [words(call)[:-2] for call in (convert, train)]
    for name in ("VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR"):
        assert f"export {name}={tmp_path}/out/" in shown.stdout


@pytest.mark.parametrize(
    ("launcher", "arguments", "given", "says"),
    [
        (SMALL, ["--emulate", "--chip", "a3"], False, "--chip=a3 is invalid"),
        (SMALL, ["--emulate", "--check"], False, "--check is invalid with --emulate"),
        (ONE_CARD, ["--emulate", "--check"], False, "--check is invalid with --emulate"),
        (SMALL, ["--check"], True, "--output=.* is invalid with --check"),
        (SMALL, ["--check", "--data", PROBLEMS], False, "--model is missing"),
        (SMALL, ["--resume", ROOT], True, r"not the folder of a complete step \(global_step_N with complete.json\)"),
        (SMALL, ["--", "trainer.n_gpus_per_node=9"], True, "sees 8 NPUs, but the job takes 9"),
    ],
)
def test_invalid_options_rejected_before_anything_is_made(machine, tmp_path, launcher, arguments, given, says):
    ended, calls = machine(launcher, *arguments, given=given)
    assert ended.returncode == 2 and not calls and not (tmp_path / "out").exists()
    assert len(ended.stderr.splitlines()) == 1 and re.search(says, ended.stderr), ended.stderr


def test_run_continues_from_a_step_of_verl(machine, tmp_path):
    step = tmp_path / "out" / "checkpoints" / "global_step_5"
    step.mkdir(parents=True)
    write_complete(step)
    ended, (*_, train) = machine(SMALL, "--resume", step)
    assert ended.returncode == 0, ended.stderr
    assert f"trainer.resume_from_path='{step}'" in words(train) and "trainer.resume_mode=resume_path" in words(train)


GUIDES = [ROOT / "docs" / f"first-hour-2026{language}.md" for language in ("", ".zh")]
KINDS = {
    "emulated": r"bash scripts/train_qwen3_\w+\.sh --emulate .*",  # tests/stack_2026/verl/test_launchers.py
    "on NPUs": r"bash scripts/train_qwen3_\w+\.sh --model .*",
    "checked": r"bash scripts/train_qwen3_\w+\.sh --check .*",  # the same file as emulated
    "planned": r"\.venv-2026/bin/python scripts/plan\.py .*",  # tests/stack_2026/verl/test_job_plans.py
    "verl's own": r"export PYTHONPATH=\$PWD|python3 -m verl\.trainer\.main_ppo .*",
    "looked at": r"python3 -m webbrowser \S+|bash scripts/watch\.sh \S+",
    "downloaded": r"(modelscope|hf) download .*|python3 -m pip install --no-deps verl==0\.9\.1",
    "in the image": r"docker exec .*|bash scripts/run_container\.sh .*",
    "printed": r"error: .*",  # tests/stack_2026/verl/test_jobs.py
}


def of_kind(guide, kind):
    return [line.strip() for line in commands(guide.read_text()) if re.fullmatch(KINDS[kind], line.strip())]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_line_of_the_guide_has_a_kind(guide):
    found = [kind for kind in KINDS for _ in of_kind(guide, kind)]
    assert len(found) == len(commands(guide.read_text())) and set(found) == set(KINDS)


@pytest.mark.parametrize("command", of_kind(GUIDES[0], "on NPUs"))
def test_command_of_the_guide_trains(machine, tmp_path, command):
    """Stand-ins replace the reader's model and data."""
    arguments = words(command)
    launcher = ROOT / arguments[1]
    for option, stand_in in (("--model", tmp_path / "a model"), ("--data", PROBLEMS), ("--test-data", PROBLEMS)):
        if option in arguments:
            arguments[arguments.index(option) + 1] = str(stand_in)
    if "--check" in arguments:
        return  # tested with real verl: tests/stack_2026/verl/test_launchers.py
    ended, calls = machine(launcher, *arguments[2:], given=False, NPUS="16")
    assert ended.returncode == 0, ended.stderr
    assert "--dry-run" in arguments or "verl.trainer.main_ppo" in calls[-1]
