"""The single-node launchers: their rejections, their commands in order, and the job itself on emulated dies."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from omegaconf import OmegaConf

from rehearsal.resume_proof.comparison import compare, digests_of
from scripts import plan
from tests.post_training.plan.test_fsdp import NAMED, NAMES, QWEN

ROOT = Path(__file__).parents[2]
ONE_CARD = ROOT / "scripts" / "train_qwen2_5_1_5b_math_one_card.sh"
EIGHT_DIES = ROOT / "scripts" / "train_qwen2_5_0_5b_gsm8k.sh"
GUIDE = ROOT / "docs" / "first-hour.md"
PROBLEMS = ROOT / "data" / "arithmetic" / "train.jsonl"
# Records its calls, and counts NPUs like torch_npu, behind a warning of CANN's.
PYTHON = """#!/bin/bash
[[ $1 == -c ]] && { echo "a warning of CANN"; echo "$NPUS ${DIE_MEMORY:-65498251264}"; exit "${IMPORT_STATUS:-0}"; }
printf '%s\\n' "$(printf '%q ' "$@")VLLM_USE_V1=$VLLM_USE_V1 VENDOR=$VENDOR" >>"$CALLS"
[[ " $* " != *" --check "* ]] || exit "${CHECK_STATUS:-0}"
[[ $1 != scripts/plan.py || -z $PLANS ]] || exec "$PLANS" "$@"
[[ $1 != scripts/plan.py ]] || exit "${PLAN_STATUS:-0}"
"""


@pytest.fixture
def machine(tmp_path):
    """Return a function that runs a launcher with stubs of python3 and CANN; it returns the end and python3's calls."""
    tools, calls = tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    (tools / "python3").write_text(PYTHON)
    (tools / "python3").chmod(0o755)
    (tmp_path / "set_env.sh").write_text("export VENDOR=sourced-$UNSET_VARIABLE\n")
    settings = tmp_path / "node.env"
    settings.write_text(f"CANN_ENV={tmp_path}/set_env.sh   # launcher: to source\nVLLM_USE_V1=1  # vllm: V1\n")
    (tmp_path / "a model").mkdir()
    (tmp_path / "a model" / "config.json").write_text("{}")

    def run(launcher, *arguments, given=True, **variables):
        calls.write_text("")
        own = ["--model", tmp_path / "a model", "--data", PROBLEMS, "--output", tmp_path / "out"] if given else []
        environment = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(tmp_path), "CALLS": str(calls), "NPUS": "8"}
        ended = subprocess.run(
            ["bash", launcher, "--settings", settings, *own, *arguments],
            env=environment | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        return ended, calls.read_text().splitlines()

    return run


@pytest.mark.parametrize(("launcher", "name"), [(ONE_CARD, "1_5b_math_one_card"), (EIGHT_DIES, "0_5b_gsm8k")])
def test_data_are_made_the_configuration_is_checked_and_then_it_trains(machine, tmp_path, launcher, name):
    ended, calls = machine(launcher, "--steps", "7", "--", "trainer.save_freq=5")
    assert ended.returncode == 0, ended.stderr
    convert, check, plan, train = map(words, calls)
    where = ["--model", f"{tmp_path}/a model/config.json", "--die-memory", "65498251264"]
    assert plan[:7] == ["scripts/plan.py", "--config-name", f"qwen2_5_{name}", *where] and "trainer.save_freq=5" in plan
    assert convert[0] == "scripts/json_to_parquet.py" and convert[convert.index("--json_path") + 1] == str(PROBLEMS)
    own = [
        "-m", "verl_patches.trainer.main_ppo", "--config-name", f"qwen2_5_{name}",
        f"actor_rollout_ref.model.path='{tmp_path}/a model'",
        f"data.train_files=['{tmp_path}/out/data/train.parquet']",
        f"data.val_files=['{tmp_path}/out/data/test.parquet']",
        f"actor_rollout_ref.overlay.measure.output_dir='{tmp_path}/out'",
        f"trainer.default_local_dir='{tmp_path}/out/checkpoints'",
        "trainer.total_training_steps=7", "trainer.save_freq=5",
    ]  # fmt: skip
    surroundings = ["VLLM_USE_V1=1", "VENDOR=sourced-"]
    assert train == [*own, *surroundings] and check == [*own, "--check", *surroundings]


def test_dry_run_prints_the_commands_of_a_run(machine, tmp_path):
    arguments = ("--test-data", PROBLEMS, "--", "data.train_batch_size=4")
    shown, calls = machine(ONE_CARD, "--dry-run", *arguments)
    assert shown.returncode == 0 and not calls and not (tmp_path / "out").exists()
    lines = [line.removeprefix("run ") for line in shown.stdout.splitlines() if line.startswith("run ")]
    _, (convert, _, _, train) = machine(ONE_CARD, *arguments)
    assert [words(line)[1:] for line in lines] == [words(call)[:-2] for call in (convert, train)]
    assert f"source {tmp_path}/set_env.sh" in shown.stdout and "export VLLM_USE_V1=1" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "given", "variables", "says"),
    [
        (["--data", PROBLEMS], False, {}, "--model is missing"),
        (["--data", PROBLEMS, "--model", ROOT], False, {}, "is invalid: no config.json"),
        (["--model", ROOT], False, {}, "--model=.* is invalid: no config.json"),
        (["--data", "nowhere.json"], True, {}, "--data=nowhere.json is invalid: the file does not exist"),
        (["--steps", "none"], True, {}, "--steps=none is invalid"),
        (["--shards", "2"], True, {}, 'Unknown argument "--shards"'),
        ([], True, {"NPUS": "7"}, "sees 7 NPUs, but the job takes 8"),
        (["--", "trainer.n_gpus_per_node=9"], True, {}, "sees 8 NPUs, but the job takes 9"),
        (["--", "trainer.n_gpus_per_node=x"], True, {}, "but the job takes x"),
        ([], True, {"IMPORT_STATUS": "1"}, "python3 cannot import torch_npu"),
        (["--emulate"], True, {}, "--emulate, which makes its own tiny model"),
        (
            ["--emulate", "--resume", "auto"],
            False,
            {},
            "--resume=auto is invalid without --output. Set --output to the folder of the run to resume",
        ),
        (["--chip", "a2"], True, {}, "--chip=a2 is invalid without --emulate: this machine's NPUs are used"),
        (["--emulate", "--chip", "910b"], False, {}, "--chip=910b is invalid. Set it to a2 or a3"),
        (["--resume", "nowhere"], True, {}, "--resume=nowhere is invalid: not the folder of a complete step"),
    ],
)
def test_invalid_arguments_rejected_before_anything_is_made(machine, tmp_path, arguments, given, variables, says):
    ended, calls = machine(EIGHT_DIES, *arguments, given=given, **variables)
    assert ended.returncode == 2 and not calls and not (tmp_path / "out").exists()
    assert len(ended.stderr.splitlines()) == 1 and ended.stderr.startswith("error: ")
    assert re.search(says, ended.stderr), ended.stderr


def test_a_job_that_does_not_fit_is_not_trained(machine):
    ended, calls = machine(ONE_CARD, PLAN_STATUS="1")
    assert ended.returncode == 2 and len(calls) == 3 and "does not fit a die of this machine" in ended.stderr
    assert machine(ONE_CARD, PLAN_STATUS="2")[0].returncode == 2


@pytest.mark.exhaustive
def test_a_die_with_five_percent_less_than_the_plan_rejected_before_anything_starts(machine, tmp_path, capsys):
    """The launcher and scripts/plan.py itself check this, for the memory size that the die reports."""
    file = tmp_path / "a model" / "config.json"
    file.write_text(json.dumps(NAMED | dict(zip(NAMES, QWEN["1.5B"][0], strict=True))))
    fixed = "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=512"
    assert plan.main(["--config-name", "qwen2_5_1_5b_math_one_card", "--model", str(file), "--json", fixed]) == 0
    most = max(json.loads(capsys.readouterr().out)["phases"].values())
    for size, code in ((most, 0), (most * 95 // 100, 2)):
        ended, calls = machine(ONE_CARD, "--", fixed, DIE_MEMORY=str(size), PLANS=sys.executable)
        assert ended.returncode == code, ended.stdout + ended.stderr
        assert ("DOES NOT FIT" in ended.stdout) == ("does not fit a die of this machine" in ended.stderr) == bool(code)
        started = [call for call in calls if "verl_patches.trainer.main_ppo" in call and "--check" not in call]
        assert len(started) == (not code)


@pytest.mark.parametrize(
    ("resume", "settings"),
    [
        ("auto", ["trainer.resume_mode=auto"]),
        ("never", ["trainer.resume_mode=disable"]),
        ("{step}", ["trainer.resume_mode=resume_path", "trainer.resume_from_path='{step}'"]),
    ],
)
def test_run_continues_from_the_given_step(machine, tmp_path, resume, settings):
    step = tmp_path / "out" / "checkpoints" / "global_step_5"
    step.mkdir(parents=True)
    (step / "trainer.json").write_text("{}")
    _, (*_, train) = machine(ONE_CARD, "--resume", resume.format(step=step), "--", "trainer.save_freq=5")
    where = words(train).index("trainer.save_freq=5")
    assert words(train)[where - len(settings) : where] == [each.format(step=step) for each in settings]


def test_relative_resume_folder_made_absolute(machine, tmp_path, monkeypatch):
    """The launcher trains in the project's folder, where a relative path of the user's would not work."""
    step = tmp_path / "out" / "checkpoints" / "global step_5"
    step.mkdir(parents=True)
    (step / "trainer.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "out")
    ended, (*_, train) = machine(ONE_CARD, "--resume", "checkpoints/global step_5")
    assert ended.returncode == 0 and f"trainer.resume_from_path='{step}'" in words(train)


def test_a_step_says_which_run_it_is_of(machine, tmp_path):
    step = tmp_path / "a run" / "checkpoints" / "global_step_5"
    step.mkdir(parents=True)
    (step / "trainer.json").write_text("{}")
    own = ("--model", tmp_path / "a model", "--data", PROBLEMS)
    ended, (*_, train) = machine(ONE_CARD, *own, "--resume", step, given=False)
    assert ended.returncode == 0 and f"trainer.default_local_dir='{tmp_path}/a run/checkpoints'" in words(train)


def test_a_configuration_that_rejected_is_not_trained(machine):
    ended, calls = machine(ONE_CARD, CHECK_STATUS="2")
    assert ended.returncode == 2 and len(calls) == 2 and "--check" in calls[-1]


def described_model(folder: Path, tokenizer: Path) -> Path:
    """Return a folder with all files of a model except its weights."""
    described = folder / "described"
    described.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, described)
    qwen = NAMED | dict(zip(NAMES, QWEN["0.5B"][0], strict=True))
    (described / "config.json").write_text(json.dumps(qwen | {"vocab_size": 512}))
    return described


def test_check_plans_the_job_and_starts_nothing(tmp_path, inputs):
    given = ("--check", "--model", described_model(tmp_path, inputs[0]), "--data", PROBLEMS)
    small = ("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    for more, code, says in (((), 0, "nothing was started"), (("trainer.savefreq=1",), 2, "trainer.save_freq")):
        ended = subprocess.run(["bash", ONE_CARD, *given, "--", *small, *more], capture_output=True, text=True)
        assert ended.returncode == code and says in ended.stdout + ended.stderr, ended.stdout + ended.stderr
        assert ("everything fits" in ended.stdout) == (code == 0)


def test_the_printed_commands_pass_their_own_check(machine, tmp_path, inputs):
    """The entry point itself runs the check, on a folder that describes a model."""
    described = described_model(tmp_path, inputs[0])
    for launcher in (ONE_CARD, EIGHT_DIES):
        shown, _ = machine(launcher, "--dry-run", "--model", described)
        *_, convert, train = (words(line)[2:] for line in shown.stdout.splitlines() if line.startswith("run "))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        # The 208 problems here are fewer than a batch of the single-card job.
        train += ["--check", "data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
        for command in (convert, train, [*train, "trainer.savefreq=1"]):
            ended = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
            )
            rejected = "savefreq" in command[-1]
            assert ended.returncode == (2 if rejected else 0), ended.stdout + ended.stderr


def words(line: str) -> list[str]:
    """Return the words of a line in bash, which may quote a path in a way that other shells do not know."""
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True).stdout
    return printed.decode().split("\0")[:-1]


def commands_of_the_guide() -> list[list[str]]:
    lines = re.findall(r"^ {4,}(bash scripts/train_qwen.*)$", GUIDE.read_text(), re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("command", commands_of_the_guide(), ids=" ".join)
def test_every_command_of_the_guide_has_a_plan(command, tmp_path):
    """Empty stand-ins replace the reader's model and data."""
    (tmp_path / "Qwen2.5-1.5B-Instruct").mkdir()
    (tmp_path / "Qwen2.5-0.5B-Instruct").mkdir()
    for name in ("Qwen2.5-1.5B-Instruct/config.json", "Qwen2.5-0.5B-Instruct/config.json"):
        (tmp_path / name).write_text("{}")
    for folder, names in (("math", ["train.parquet"]), ("gsm8k", ["train.jsonl", "test.jsonl"])):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    words = [re.sub("^/data/", f"{tmp_path}/", word) for word in command]
    words.insert(2, "--dry-run")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ("make_tiny_checkpoint" in ended.stdout or "rehearsal.training" in ended.stdout) == ("--emulate" in command)


@pytest.mark.parametrize("command", [each for each in commands_of_the_guide() if "--emulate" not in each], ids=" ".join)
def test_a_command_of_the_guide_for_npus_trains(command, machine, tmp_path):
    """The stub of torch_npu reports NPUs; the reader's files are stand-ins as above."""
    for folder, names in (("math", ["train.parquet"]), ("gsm8k", ["train.jsonl", "test.jsonl"])):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    _, launcher, *arguments = [re.sub("^/data/Qwen[^/]*", f"{tmp_path}/a model", word) for word in command]
    arguments = [re.sub("^/data/", f"{tmp_path}/", word) for word in arguments]
    ended, calls = machine(ROOT / launcher, *arguments, "--output", tmp_path / "out", given=False)
    assert ended.returncode == 0, ended.stderr
    assert not calls if "--dry-run" in arguments else "verl_patches.trainer.main_ppo" in calls[-1], calls


def test_the_guide_has_commands_of_both_kinds():
    commands = commands_of_the_guide()
    assert {"--emulate" in command for command in commands} == {True, False}
    assert {command[1] for command in commands} == {f"scripts/{file.name}" for file in (ONE_CARD, EIGHT_DIES)}


def emulate(launcher: Path, output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run as a newcomer does. Return the ended process and the metrics of each step."""
    ended = subprocess.run(
        ["bash", launcher, "--emulate", "--output", output, *arguments],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    lines = (output / "metrics.jsonl").read_text().splitlines() if (output / "metrics.jsonl").exists() else []
    entries = [json.loads(line) for line in lines]
    return ended, [entry["metrics"] for entry in entries if entry["step"]]


# A rule of our own that fires after two steps, in addition to the documented command's thresholds.
LASTING = "+actor_rollout_ref.overlay.alerts.rules.lasting={metric: critic/score/mean, below: 1.8, for: 2}"


def observed_run() -> list[str]:
    """Return the arguments of the command in docs/tracking.md with profile and alerts, without launcher and folder."""
    text = (ROOT / "docs" / "tracking.md").read_text()
    (command,) = re.findall(r"^    (bash scripts/train_qwen.*(?:\n .*)+)", text, re.MULTILINE)
    _, launcher, emulated, *arguments = shlex.split(command.replace("\\\n", " "))
    assert ROOT / launcher == ONE_CARD and emulated == "--emulate"
    output = arguments.index("--output")
    return arguments[:output] + arguments[output + 2 :]


def assert_is_observed(output: Path) -> None:
    """Check the page's title, and that the profiler recorded only the first step."""
    assert "<title>verl-production-monitoring</title>" in (output / "report.html").read_text()
    (trace,) = (output / "profile").glob("step_*/rank_0_*_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json")
    assert "step_1" in trace.parts and len(json.loads(trace.read_text())) > 1000


def alerts_of(folder: Path) -> list[tuple[int, str]]:
    entries = map(json.loads, (folder / "alerts.jsonl").read_text().splitlines())
    return [(entry["step"], entry["alert"]) for entry in entries]


@pytest.mark.slow
def test_one_emulated_die_trains_exactly_and_goes_on_to_the_bit(tmp_path):
    """The second step is trained twice: after the first, and from the first's checkpoint; alerts are raised once. The
    folder's name is one that a user may have, and the die is an Atlas A2's, whose FLOPs verl knows by name."""
    output = tmp_path / "第一 次"
    saving = ("trainer.save_freq=1", "actor_rollout_ref.overlay.precision=float32")
    ended, steps = emulate(ONE_CARD, output, "--chip", "a2", *observed_run(), *saving, LASTING)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert alerts_of(output) == [(1, "reward_score"), (2, "lasting")]
    assert_is_observed(output)
    assert all(step["perf/mfu/actor"] > 0 for step in steps)
    assert len(steps) == 2 and "2 steps on 1 emulated die, seed 1" in ended.stdout
    assert all(step["training/rollout_logprob_diff_max"] < 1e-3 and step["actor/grad_norm"] > 0 for step in steps)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["failure"] is None
    assert summary["patches_effective"] == summary["patches_applied"] > 0
    assert (output / "report.html").exists() and list((output / "tensorboard").rglob("*tfevents*"))
    assert_goes_on(ONE_CARD, output, 2)
    assert alerts_of(output) == [(1, "reward_score"), (2, "lasting")]


def assert_goes_on(launcher: Path, output: Path, last: int) -> None:
    """Check that the run in `output`, resumed after its first step, ends as it did before."""
    unbroken = output.with_name("unbroken")
    shutil.copytree(output, unbroken)
    first = output / "checkpoints" / "global_step_1"
    ended, _ = emulate(launcher, output, "--resume", str(first))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Continuing after step 1" in ended.stdout
    result = compare(unbroken, output, last)
    assert result.steps >= last and result.differing == () and result.metrics > 50  # step 0 is the validation
    assert digests_of(output, last) != digests_of(output, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [ONE_CARD, EIGHT_DIES], ids=["1 die", "2 dies"])
def test_a_job_trains_exactly(launcher, tmp_path):
    """In float32, rollout and training log-probs agree if the weights do."""
    precision = "actor_rollout_ref.overlay.precision=float32"
    ended, steps = emulate(launcher, tmp_path, "--steps", "2", "--", precision)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(steps) == 2 and all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["perf/mfu/actor"] == 0 for step in steps), "an Atlas A3 is unknown to verl"
    assert all(step["training/rollout_logprob_diff_max"] < 1e-3 for step in steps)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["patches_effective"] == summary["patches_applied"] > 0


@pytest.mark.exhaustive
def test_a_rollout_with_stale_weights_is_caught_by_the_gate(tmp_path):
    """The control of the test above: with stale weights the first step is exact, and the second is not."""
    overrides = ("actor_rollout_ref.overlay.precision=float32", "trainer.save_freq=-1", "trainer.test_freq=-1")
    stale = "actor_rollout_ref.model.external_lib=tests.scripts.stale_rollout"
    ended, steps = emulate(ONE_CARD, tmp_path / "run", "--steps", "2", "--", *overrides, stale)
    first, second = (step["training/rollout_logprob_diff_max"] for step in steps)
    assert first < 1e-3 < second, (first, second)
    assert ended.returncode == 1 and "log-prob" in ended.stdout + ended.stderr


STRATEGY = "actor_rollout_ref.actor.strategy"


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("launcher", [ONE_CARD, EIGHT_DIES], ids=["1 die", "2 dies"])
def test_three_steps_go_on_after_the_first_to_the_bit(launcher, precision, strategy, tmp_path):
    output = tmp_path / "run"
    saving = ("trainer.save_freq=1", f"actor_rollout_ref.overlay.precision={precision}", f"{STRATEGY}={strategy}")
    warm = "actor_rollout_ref.actor.optim.lr_warmup_steps=2"
    keep = "actor_rollout_ref.overlay.checkpoint.keep_last=0"
    ended, _ = emulate(launcher, output, "--steps", "3", "--", *saving, warm, keep)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert_goes_on(launcher, output, 3)
    assert sharded_by(output) == {"actor": strategy, "ref": strategy}


def sharded_by(output: Path) -> dict[str, str]:
    """Return each model's sharding strategy from the run's own configuration."""
    node = OmegaConf.load(output / "config.yaml")
    found = {name: node.actor_rollout_ref[name].strategy for name in ("actor", "ref")}
    return found | ({"critic": node.critic.strategy} if node.algorithm.adv_estimator == "gae" else {})


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_critic_goes_on_after_the_first_step_to_the_bit(strategy, tmp_path):
    output = tmp_path / "run"
    saving = (
        "trainer.save_freq=1",
        "algorithm.adv_estimator=gae",
        "trainer.n_gpus_per_node=2",
        f"{STRATEGY}={strategy}",
    )
    keep = "actor_rollout_ref.overlay.checkpoint.keep_last=0"
    ended, steps = emulate(EIGHT_DIES, output, "--steps", "2", "--", *saving, keep)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    assert_goes_on(EIGHT_DIES, output, 2)
    assert any(name.startswith("critic/") for name in digests_of(output, 2))
    assert sharded_by(output) == dict.fromkeys(("actor", "ref", "critic"), strategy)


@pytest.mark.exhaustive
def test_dapo_trains_on_fsdp(tmp_path):
    """In float32 it trains exactly, on groups with different rewards and without cut answers."""
    recipe = ("+recipe=dapo", "algorithm.overlong_filtering=true", "actor_rollout_ref.overlay.precision=float32")
    ended, steps = emulate(EIGHT_DIES, tmp_path, "--steps", "3", "--", *recipe)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(step["training/rollout_logprob_diff_max"] < 1e-3 and step["actor/grad_norm"] > 0 for step in steps)
    assert [step["sampling/groups_with_gradient"] for step in steps] == [1.0] * 3
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["groups_with_gradient"] == 1 and 0 <= summary["truncated_share"] < 1
    assert summary["generated_prompts"] >= summary["trained_prompts"] == 96
    assert summary["patches_effective"] == summary["patches_applied"] > 0


@pytest.mark.exhaustive
def test_one_die_continues_from_two(tmp_path):
    """So does two from one. The rollout then draws other answers, so the steps are not compared."""
    output = tmp_path / "run"
    saving = ("trainer.save_freq=1", "actor_rollout_ref.overlay.precision=float32")
    ended, _ = emulate(EIGHT_DIES, output, "--steps", "1", "--", *saving)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for steps, dies in ((2, 1), (3, 2)):
        tensor = f"actor_rollout_ref.rollout.tensor_model_parallel_size={dies}"
        options = ("--resume", "auto", "--steps", str(steps), "--", f"trainer.n_gpus_per_node={dies}", tensor)
        ended, entries = emulate(EIGHT_DIES, output, *options)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert len(entries) == steps and entries[-1]["training/rollout_logprob_diff_max"] < 1e-3
        assert len(list((output / "checkpoints" / f"global_step_{steps}" / "actor").glob("rank-*"))) == dies


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launcher", "overrides"),
    [(ONE_CARD, ()), (EIGHT_DIES, ()), (EIGHT_DIES, ("--", "algorithm.adv_estimator=gae"))],
    ids=["1 die", "2 dies", "2 dies and a critic"],
)
def test_twenty_steps_learn_the_arithmetic(launcher, overrides, tmp_path):
    ended, steps = emulate(launcher, tmp_path / "run", *overrides)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rewards = [step["critic/score/mean"] for step in steps]
    print(rewards)
    # With an unchanged policy, one step's mean over 256 answers varies by about 0.05, so the difference of two means of
    # three steps varies by about 0.04.
    assert len(rewards) == 20 and mean(rewards[-3:]) > mean(rewards[:3]) + 0.2
