"""scripts/preflight.py --stack 2026: a valid job passes, and each planted fault fails its stage."""

import json
import shlex
from pathlib import Path

import pytest

import scripts.preflight as preflight
from post_training.report.run_folder import METRICS
from rehearsal.stack_2026.resume_proof import STEPS
from rehearsal.stack_2026.scaled_down_job import FIRST_STEP, OF_MEGATRON, ScaledDownJob2026
from scripts.health_checks.finding import Finding
from tests.stack_2026.verl.test_jobs import ACTOR, CLUSTER, DIES_256, ONE_CARD, ONE_NODE, ROLLOUT, model_folder

NORM = "algorithm.norm_adv_by_std_in_grpo=false"
# The last step validates, with one greedy answer for each problem.
VALIDATES = [
    f"trainer.test_freq={STEPS}",
    *(f"{ROLLOUT}.val_kwargs.{each}" for each in ("do_sample=false", "temperature=0", "n=1")),
]
SCORE = "val-aux/arithmetic/reward/mean@1"


@pytest.fixture(autouse=True)
def dies(monkeypatch):
    """Healthy dies; the check of dies has its own tests."""
    monkeypatch.setattr(preflight, "check_device", lambda: [Finding("event order", "kept")])


def look(tmp_path, *words, job=DIES_256):
    """Run the preflight, and return the exit code and the stages by name."""
    (tmp_path / "model").mkdir()
    path = f"actor_rollout_ref.model.path={model_folder(tmp_path / 'model', job)}"
    output = tmp_path / "out"
    arguments = ["--stack", "2026", "--config-name", job, "--output", str(output), path, "trainer.save_freq=-1"]
    code = preflight.main([*arguments, *words])
    stages = json.loads((output / "preflight.json").read_text())
    return code, {stage["stage"]: (stage["state"], stage["said"]) for stage in stages}


def test_job_that_is_well_passes_and_names_the_emulated_run(tmp_path):
    code, stages = look(tmp_path, "--dry-run", NORM, "data.max_response_length=2048", f"{ROLLOUT}.n=8")
    assert code == 0, stages
    assert [state for state, _ in stages.values()] == ["passed", "passed", "left out", "passed", *["left out"] * 5]
    command = shlex.split(stages["scaled_down_job"][1].removeprefix("--dry-run: "))
    assert command[1:5] == ["-m", "rehearsal.stack_2026.resume_proof", "--job", DIES_256]
    # The rehearsal sets sizes and placements; everything else is the job's.
    assert command[command.index("--") + 1 :] == [NORM, f"{ROLLOUT}.n=8", *VALIDATES]


@pytest.mark.parametrize(
    ("planted", "stage", "said"),
    [
        ("data.train_batch_sizes=32", "checks", "Set data.train_batch_size instead"),
        (f"{ROLLOUT}.expert_parallel_size=64", "checks", "expert_parallel_size=64 is invalid"),
        ("--die-memory=20GiB", "plan", "update: "),
        (f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=false", "plan", "update: "),
    ],
)
def test_planted_fault_is_found(tmp_path, planted, stage, said):
    code, stages = look(tmp_path, "--no-scaled-down-job", planted)
    assert code == 1 and stages[stage][0] == "failed" and said in stages[stage][1], stages
    assert "Traceback" not in stages[stage][1]


def test_node_is_checked_by_the_doctor_of_the_stack(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(preflight.doctor, "read_settings", lambda path: {"CHIP": "A3"})
    monkeypatch.setattr(preflight.doctor, "main", lambda arguments: asked.append(arguments) or 0)
    monkeypatch.setattr(preflight, "_of_cluster", lambda cluster: [])
    file = preflight.ROOT / "scripts" / "env" / "a3_256_dies_2026.env"
    _, stages = look(tmp_path, "--no-scaled-down-job", "--cluster", str(file))
    assert asked == [["--cluster", str(file), "--no-self-test", "--stack", "2026"]] and stages["node"][0] == "passed"


@pytest.mark.parametrize(("lost", "state"), [(None, preflight.PASSED), ("actor/grad_norm", preflight.FAILED)])
def test_first_step_has_every_metric(tmp_path, lost, state):
    metrics = {name: 0.25 for name in (*FIRST_STEP, OF_MEGATRON, "timing_s/step") if name != lost}
    records = [{"step": step, "time": 0.0, "metrics": metrics} for step in (1, 2)]
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "unbroken" / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    found, said = preflight._first_step(ScaledDownJob2026.of_job(DIES_256, (), tmp_path))
    assert found == state and (lost or "actor/nonfinite_steps = 0.25") in said


@pytest.mark.parametrize(("name", "state"), [("val-core/reward", preflight.PASSED), ("actor/lr", preflight.FAILED)])
def test_last_step_has_a_validation(tmp_path, name, state):
    scaled = validated(tmp_path, {name: 0.25}, "trainer.test_freq=20")
    assert scaled.proof()[-4:] == VALIDATES
    (scaled.folder / "exported").mkdir()
    found, said = preflight._validation(scaled, scaled.run)
    assert found == state and (said == f"{name} = 0.25" or "no metric of a validation" in said)
    assert not (scaled.folder / "exported").exists()  # an earlier preflight's


def validated(folder: Path, metrics: dict[str, float], *words: str, config: str = "") -> ScaledDownJob2026:
    """Return a scaled-down job whose run has ended with these metrics of its last step."""
    scaled = ScaledDownJob2026.of_job(DIES_256, words, folder)
    scaled.run.mkdir(parents=True)
    steps = enumerate(({}, metrics), start=1)
    lines = [json.dumps({"step": step, "time": 0.0, "metrics": each}) for step, each in steps]
    (scaled.run / METRICS).write_text("\n".join(lines) + "\n")
    if config:
        (scaled.run / "config.yaml").write_text(config)
    return scaled


CONFIG = """
data: {max_response_length: 10}
actor_rollout_ref: {rollout: {tensor_model_parallel_size: 2}}
reward: {custom_reward_function: {path: /a reward.py, name: score, reward_kwargs: {}}}
"""


def test_last_checkpoint_is_exported_and_evaluated_as_the_run_validated(tmp_path):
    scaled = validated(tmp_path, {}, config=CONFIG)
    program, checkpoint, out = scaled.export()[1:]
    assert program.endswith("scripts/export_hf.py") and out == str(tmp_path / "exported")
    assert checkpoint == str(tmp_path / "unbroken" / "checkpoints" / f"global_step_{STEPS}")
    command = scaled.evaluation()[2:]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "--emulate" and options == {
        "--stack": "2026", "--model": out, "--data": str(tmp_path / "unbroken" / "data" / "test.parquet"), "--n": "2",
        "--max-tokens": "10", "--tensor-parallel": "2", "--reward": "/a reward.py:score",
        "--output": str(tmp_path / "evaluation"),
    }  # fmt: skip


def evaluated(folder: Path, scores: list[float]) -> None:
    """Write the evaluation of a model, with the scores of its greedy answers."""
    answers = [{"answers": {"exported": {"greedy": {"score": score}, "sampled": [{"score": 7}]}}} for score in scores]
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps({"questions": answers}))


@pytest.mark.parametrize(
    ("metrics", "state", "said"),
    [
        ({SCORE: 2 / 3, "val-core/arithmetic/acc/mean@1": 1.0}, preflight.PASSED, "greedy answers score 0.6667"),
        ({SCORE: 1 / 3}, preflight.FAILED, "the export's greedy answers score 0.6667, the run's validation 0.3333"),
        ({"val-core/arithmetic/acc/mean@1": 2 / 3}, preflight.FAILED, "the last step has 0 metrics /reward/mean@1"),
    ],
)
def test_evaluation_with_another_score_than_the_validation_fails(tmp_path, metrics, state, said):
    scaled = validated(tmp_path, metrics, config=CONFIG)
    evaluated(tmp_path, [1.0, 0.0, 1.0])
    found, text = preflight._same_score(scaled, (preflight.PASSED, "the table"))
    assert found == state and text.startswith(said) and ("the table" in text) == (state == preflight.PASSED)
    assert preflight._same_score(scaled, (preflight.FAILED, "no vLLM")) == (preflight.FAILED, "no vLLM")
    (scaled.run / "config.yaml").write_text(CONFIG.replace("reward_kwargs: {}", "reward_kwargs: {rule: gsm8k}"))
    found, text = preflight._same_score(scaled, (preflight.PASSED, "the table"))
    assert (
        found == preflight.PASSED
        and text.startswith("not compared with the validation")
        and "--reward" not in scaled.evaluation()
    )


@pytest.mark.exhaustive("trains a job three times")
@pytest.mark.parametrize("job", [ONE_CARD, ONE_NODE, *CLUSTER])
def test_scaled_down_job_passes_every_stage(tmp_path, job):
    code, stages = look(tmp_path, job=job)
    assert code == 0, stages
    assert [state for state, _ in stages.values()] == ["passed", "passed", "left out", *["passed"] * 6]
    assert stages["evaluation"][1].startswith("greedy answers score ") and "answers: " in stages["evaluation"][1]
