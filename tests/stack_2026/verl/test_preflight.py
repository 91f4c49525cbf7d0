"""scripts/preflight.py --stack 2026: a valid job passes, and each planted fault fails its stage."""

import json
import shlex

import pytest

import scripts.preflight as preflight
from post_training.report.run_folder import METRICS
from rehearsal.stack_2026.resume_proof import STEPS
from rehearsal.stack_2026.scaled_down_job import FIRST_STEP, OF_MEGATRON, ScaledDownJob2026
from scripts.health_checks.finding import Finding
from tests.stack_2026.verl.test_jobs import ACTOR, DIES_256, ROLLOUT, model_folder

NORM = "algorithm.norm_adv_by_std_in_grpo=false"


@pytest.fixture(autouse=True)
def dies(monkeypatch):
    """Healthy dies; the check of dies has its own tests."""
    monkeypatch.setattr(preflight, "check_device", lambda: [Finding("event order", "kept")])


def look(tmp_path, *words):
    """Run the preflight, and return the exit code and the stages by name."""
    (tmp_path / "model").mkdir()
    path = f"actor_rollout_ref.model.path={model_folder(tmp_path / 'model', DIES_256)}"
    output = tmp_path / "out"
    arguments = ["--stack", "2026", "--config-name", DIES_256, "--output", str(output), path, "trainer.save_freq=-1"]
    code = preflight.main([*arguments, *words])
    stages = json.loads((output / "preflight.json").read_text())
    return code, {stage["stage"]: (stage["state"], stage["said"]) for stage in stages}


def test_job_that_is_well_passes_and_names_the_emulated_run(tmp_path):
    code, stages = look(tmp_path, "--dry-run", NORM, "data.max_response_length=2048", f"{ROLLOUT}.n=8")
    assert code == 0, stages
    assert [state for state, _ in stages.values()] == ["passed", "passed", "left out", "passed", *["left out"] * 3]
    command = shlex.split(stages["scaled_down_job"][1].removeprefix("--dry-run: "))
    assert command[1:5] == ["-m", "rehearsal.stack_2026.resume_proof", "--job", DIES_256]
    # The rehearsal sets sizes and placements; everything else is the job's.
    assert command[command.index("--") + 1 :] == [NORM, f"{ROLLOUT}.n=8", "trainer.test_freq=2"]


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
    scaled = ScaledDownJob2026.of_job(DIES_256, ("trainer.test_freq=20",), tmp_path)
    assert scaled.proof()[-1] == f"trainer.test_freq={STEPS}"
    scaled.run.mkdir()
    metrics = [{}, {name: 0.25}]
    lines = [json.dumps({"step": step, "time": 0.0, "metrics": each}) for step, each in enumerate(metrics, start=1)]
    (scaled.run / METRICS).write_text("\n".join(lines) + "\n")
    found, said = preflight._validation_result(scaled.validated(), scaled.run)
    assert found == state and (said == f"{name} = 0.25" or "no metric of a validation" in said)
