"""scripts/preflight.py: a valid job passes, and every planted fault is found before anything starts."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest

import rehearsal.scaled_down_job
import scripts.preflight as preflight
from scripts.health_checks.finding import Finding
from tests.scripts.cluster_files import SHIPPED

SCALED_DOWN = ("scaled_down_job", "validation", "export", "evaluation")
DEEPSEEK_V3 = preflight.ROOT / "tests" / "post_training" / "plan" / "deepseek_v3_config.json"
SIZES = ["data.train_batch_size=32", "trainer.logger=[console]", "trainer.save_freq=1"]


@pytest.fixture(autouse=True)
def dies(monkeypatch):
    """Make the dies pass; their check has its own tests."""
    monkeypatch.setattr(preflight, "check_device", lambda: [Finding("event order", "kept")])


@pytest.fixture
def job(inputs, tmp_path):
    """Return the overrides of a job whose model and data exist."""
    model, data = inputs
    own = [f"actor_rollout_ref.model.path={model}", f"data.train_files=[{data}]", f"data.val_files=[{data}]"]
    return [*own, f"trainer.default_local_dir={tmp_path / 'checkpoints'}", *SIZES]


def look(tmp_path, words):
    """Run the preflight. Return the exit code and the stages by name."""
    output = tmp_path / "out"
    arguments = ["--config-name", "rehearsal", "--output", str(output), *words]
    code = preflight.main(arguments if "--dry-run" in words else ["--no-scaled-down-job", *arguments])
    stages = json.loads((output / "preflight.json").read_text())
    return code, {stage["stage"]: (stage["state"], stage["said"]) for stage in stages}


def test_a_job_that_is_well_passes_on_one_page(tmp_path, job, capsys):
    code, stages = look(tmp_path, job)
    assert code == 0, stages
    assert {name: state for name, (state, _) in stages.items()} == {
        "checks": "passed", "plan": "passed", "node": "left out", "device": "passed",
        **dict.fromkeys(SCALED_DOWN, "left out"),
    }  # fmt: skip
    page = (tmp_path / "out" / "preflight.html").read_text()
    assert "all checks passed" in page and "all checks passed" in capsys.readouterr().out
    assert not (tmp_path / "checkpoints").exists()


def test_relative_path_is_of_the_users_folder(tmp_path, monkeypatch):
    """The scaled-down job starts in the checkout."""
    monkeypatch.chdir(tmp_path)
    options = preflight._options(["--config-name", "rehearsal", "custom_reward_function.path=reward.py"])
    assert options.overrides == [f"custom_reward_function.path={tmp_path / 'reward.py'}"]


FAULTS = {
    "a key that nothing reads": ("data.train_batch_sizes=32", "checks", "data.train_batch_sizes"),
    "a value of another kind": ("data.train_batch_size=many", "checks", "data.train_batch_size"),
    "a layout that does not divide": (
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=3", "checks", "do not divide into whole training"),
    "a batch that does not divide": ("data.train_batch_size=7", "checks", "7"),
    "stages of too few layers": (
        "actor_rollout_ref.actor.megatron.override_transformer_config.num_layer_list=[1,1]", "checks", "adds up to 2"),
    "no such model": ("actor_rollout_ref.model.path=/absent", "checks", "/absent"),
    "no such data": ("data.train_files=[/absent.parquet]", "checks", "/absent.parquet"),
    "no such reward": ("custom_reward_function.name=absent", "checks", "custom_reward_function.name=absent"),
    "a tracker without its package": ("trainer.logger=[console,wandb]", "checks", "wandb"),
    "an estimator that nobody knows": ("algorithm.adv_estimator=gpro", "checks", "gpro"),
    "dies that are too small": ("--die-memory=20MiB", "plan", "a die has 0.02"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path, job, fault):
    planted, stage, said = FAULTS[fault]
    code, stages = look(tmp_path, [*job, planted])
    assert code == 1 and stages[stage][0] == "failed" and said in stages[stage][1], stages
    assert "Traceback" not in stages[stage][1]
    assert "not fit to start" in (tmp_path / "out" / "preflight.html").read_text()


def test_data_without_a_column_for_the_reward_is_found(tmp_path, inputs, job):
    table = pyarrow.parquet.read_table(inputs[1]).drop_columns(["reward_model"])
    pyarrow.parquet.write_table(table, tmp_path / "poor.parquet")
    code, stages = look(tmp_path, [*job, f"data.train_files=[{tmp_path / 'poor.parquet'}]"])
    assert code == 1 and "reward_model" in stages["checks"][1]


def test_disk_too_small_for_checkpoints_is_found(tmp_path, job, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    code, stages = look(tmp_path, job)
    assert code == 1 and "GB free" in stages["checks"][1]
    assert any(line.startswith("disk: ") for line in stages["plan"][1].splitlines())


def test_a_clusters_file_that_is_not_filled_in_rejected(tmp_path, capsys):
    assert (
        preflight.main(["--config-name", "rehearsal", "--cluster", str(SHIPPED), "--output", str(tmp_path / "out")])
        == 2
    )
    assert "still the placeholder" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_faults_of_a_node_are_named(monkeypatch):
    def examined(arguments):
        assert arguments == ["--cluster", "/a cluster.env", "--no-self-test", "--stack", "2025"]
        print("ok    NPUs       16 of 16\nBAD   /dev/shm   1 GB; mount more")
        return 1

    monkeypatch.setattr(preflight.doctor, "main", examined)
    assert preflight._node(SimpleNamespace(cluster=Path("/a cluster.env"), stack="2025")) == (
        preflight.FAILED, "BAD   /dev/shm   1 GB; mount more",
    )  # fmt: skip


def test_checks_that_look_at_nothing_are_seen(tmp_path, job, monkeypatch):
    """The control: without the entry point's checks, the faults of that stage pass."""
    monkeypatch.setattr(preflight.main_ppo, "main", lambda arguments: 0)
    planted, stage, _ = FAULTS["no such reward"]
    assert look(tmp_path, [*job, planted])[1][stage][0] == "passed"


# Stands in for each command of the scaled-down job: prints its arguments, writes the files that are read
# later, and fails if told to.
COMMAND = """
import json, sys
from pathlib import Path
name = Path(sys.argv[0]).stem
print(sys.argv[1:])
folder = Path({folder!r}) / "unbroken"
if name == "prove_resume":
    folder.mkdir(parents=True, exist_ok=True)
    found = {validation}
    (folder / "metrics.jsonl").write_text(json.dumps(dict(step=3, metrics=found)))
    reward = dict(path="/a reward.py", name="score", reward_kwargs={arguments})
    config = dict(custom_reward_function=reward, data=dict(max_response_length=10))
    (folder / "config.yaml").write_text(json.dumps(config))
if name == "{failing}":
    print("error: it differs")
    sys.exit(1)
"""


@pytest.fixture
def scaled(tmp_path, monkeypatch, job):
    """Return a function that runs a preflight with stand-in commands. It returns exit code, stages and logs."""
    root, output = tmp_path / "root", tmp_path / "out"
    (root / "scripts").mkdir(parents=True)
    monkeypatch.setattr(rehearsal.scaled_down_job, "ROOT", root)

    def run(*more, failing="", validation='{"val-core/reward": 0.5}', arguments="{}"):
        folder = str(output / "scaled_down_job")
        text = COMMAND.format(folder=folder, validation=validation, arguments=arguments, failing=failing)
        for name in ("prove_resume", "export_hf", "evaluate"):
            (root / "scripts" / f"{name}.py").write_text(text)
        code = preflight.main(["--config-name", "rehearsal", "--output", str(output), *job, *more])
        stages = {stage["stage"]: stage for stage in json.loads((output / "preflight.json").read_text())}
        return code, stages, {name: log.read_text() for name in SCALED_DOWN if (log := output / f"{name}.log").exists()}

    return run


def test_scaled_down_job_is_the_job_on_other_dies_and_used(scaled, tmp_path):
    code, stages, logs = scaled("actor_rollout_ref.rollout.n=4")
    assert code == 0 and [stages[name]["state"] for name in SCALED_DOWN] == ["passed"] * 4, stages
    called = logs["scaled_down_job"]
    assert "'actor_rollout_ref.rollout.n=4'" in called and "'--points', '1'" in called
    assert "'trainer.test_freq=3'" in called, "its last step validates"
    assert not re.search(r"model\.path|train_files|default_local_dir|train_batch_size|logger|save_freq", called)
    assert stages["validation"]["said"] == "val-core/reward = 0.5"
    assert f"unbroken/checkpoints/global_step_3', '{tmp_path}/out/scaled_down_job/exported'" in logs["export"]
    assert f"'--model', '{tmp_path}/out/scaled_down_job/exported'" in logs["evaluation"]
    assert "'--reward', '/a reward.py:score'" in logs["evaluation"] and "'--max-tokens', '10'" in logs["evaluation"]
    assert f"'--output', '{tmp_path}/out/scaled_down_job/evaluation'" in logs["evaluation"]


def test_preflight_removes_earlier_exports(scaled, tmp_path):
    for name in ("exported", "evaluation", "data"):
        (tmp_path / "out" / "scaled_down_job" / name).mkdir(parents=True)
    assert scaled()[0] == 0
    assert sorted(path.name for path in (tmp_path / "out" / "scaled_down_job").iterdir()) == ["data", "unbroken"]


def test_a_reward_with_arguments_is_not_called_without_them(scaled):
    assert "--reward" not in scaled(arguments='{"rule": "gsm8k"}')[2]["evaluation"]


@pytest.mark.parametrize(
    ("stage", "planted"),
    [
        ("scaled_down_job", {"failing": "prove_resume"}),
        ("validation", {"validation": '{"actor/lr": 1.0}'}),
        ("export", {"failing": "export_hf"}),
        ("evaluation", {"failing": "evaluate"}),
    ],
)
def test_a_stage_of_the_scaled_down_job_that_fails_ends_it(scaled, stage, planted):
    code, stages, _ = scaled(**planted)
    assert code == 1 and stages[stage]["state"] == "failed"
    after = SCALED_DOWN[SCALED_DOWN.index(stage) + 1 :]
    assert {(stages[name]["state"], stages[name]["said"]) for name in after} <= {("left out", "something above failed")}
    assert stages[stage]["said"].startswith("the last step has no" if stage == "validation" else "it differs")


def test_the_scaled_down_job_does_not_begin_where_a_check_failed(scaled):
    code, stages, logs = scaled("algorithm.adv_estimator=gpro")
    assert code == 1 and logs == {}
    emulated = stages["scaled_down_job"]
    assert (emulated["state"], emulated["said"]) == ("left out", "something above failed")


def test_no_twin_still_skips_the_scaled_down_job():
    assert preflight._options(["--config-name", "rehearsal", "--no-twin"]).no_scaled_down_job


def test_dry_run_prints_the_command_of_the_emulated_run(tmp_path, job):
    _, stages = look(tmp_path, ["--dry-run", *job])
    state, said = stages["scaled_down_job"]
    assert state == "left out" and f"{shlex.quote(sys.executable)} " in said


@pytest.mark.exhaustive("trains a configuration three times")
def test_the_rehearsals_own_job_passes_when_scaled_down(tmp_path, job):
    assert preflight.main(["--config-name", "rehearsal", "--output", str(tmp_path / "out"), *job]) == 0
    passed_when_scaled_down(tmp_path / "out")


def passed_when_scaled_down(output):
    stages = {stage["stage"]: stage for stage in json.loads((output / "preflight.json").read_text())}
    assert [stage["state"] for stage in stages.values()] == ["passed", "passed", "left out", *["passed"] * 5]
    assert "1 of 1 resumes equalled the unbroken run, bit for bit" in stages["scaled_down_job"]["said"]
    assert "val-" in stages["validation"]["said"] and "answers: " in stages["evaluation"]["said"]


@pytest.mark.exhaustive("trains a configuration three times")
@pytest.mark.parametrize("name", ["deepseek_v3_256die_true_weight", "deepseek_v3_256die_random_init"])
def test_the_scaled_down_jobs_of_671b_pass(tmp_path, job, inputs, name):
    """Only config.json and tokenizer of the model are here, and the machine has no room for its checkpoints."""
    model = tmp_path / "DeepSeek-V3"
    model.mkdir()
    shutil.copy(DEEPSEEK_V3, model / "config.json")
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (inputs[0] / file).exists():
            shutil.copy(inputs[0] / file, model)
    rows = pyarrow.parquet.read_table(inputs[1])
    batch = 512  # the job's; fewer rows are rejected
    pyarrow.parquet.write_table(pyarrow.concat_tables([rows] * (batch // len(rows) + 1)), tmp_path / "many.parquet")
    replaced = re.compile(r"actor_rollout_ref\.model\.path|data\.(train|val)_files")
    own = [word for word in job if word not in SIZES and not replaced.match(word)]
    own += [f"actor_rollout_ref.model.path={model}", "trainer.save_freq=-1", "trainer.logger=[console]"]
    own += [f"data.{kind}_files=[{tmp_path / 'many.parquet'}]" for kind in ("train", "val")]
    output = tmp_path / "out"
    assert preflight.main(["--config-name", name, "--swap-optimizer", "--output", str(output), *own]) == 0
    passed_when_scaled_down(output)
