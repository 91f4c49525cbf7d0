"""scripts/summarise.py on run folders: a run like the published row, and folders that are not runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from post_training.report.published import DEEPSEEK_V3, RANDOM_WEIGHTS, TRUE_WEIGHTS
from scripts import summarise

ROOT = Path(__file__).parents[2]
STAGE_METRICS = {
    "old_log_prob": "old_log_prob",
    "ref": "ref",
    "reward": "reward",
    "adv": "adv",
    "update": "update_actor",
    "reshard": "reshard",
}


def configuration(**changes) -> dict:
    """Return the part of the configuration of the job with real weights that is read."""
    return {
        "data": {"train_batch_size": 512},
        "trainer": {"n_gpus_per_node": 16, "nnodes": 16, "total_training_steps": 3},
        "actor_rollout_ref": {
            "rollout": {"n": 16, "ignore_eos": False},
            "actor": {"load_weight": True},
            "model": {
                "path": "/nowhere",
                "enable_gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"activations_checkpoint_num_layers": 4},
            },
            "overlay": {"router_balance": {"forced": False}},
        },
    } | changes


def metrics(row, **changes) -> dict:
    """Return the metrics of a step like a published row; verl counts the reshard as generation."""
    statistics = row.statistics
    seconds = {f"timing_s/{name}": statistics.seconds[stage] for stage, name in STAGE_METRICS.items()}
    return {
        **seconds,
        "timing_s/gen": statistics.seconds["rollout"] + statistics.seconds["reshard"],
        "timing_s/step": statistics.total,
        "timing_s/offload": 20.0,
        "prompt_length/mean": statistics.prompt_tokens,
        "response_length/mean": statistics.response_tokens,
        "response_length/clip_ratio": 0.25,
        "perf/mfu/actor": 0.0,
        "perf/throughput": statistics.tokens / statistics.total / 256,
    } | changes


def write_run(folder: Path, *steps: dict, config: dict | None = None, model: dict | None = DEEPSEEK_V3) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(config or configuration()))
    lines = [json.dumps({"step": number, "time": 0.0, "metrics": each}) for number, each in enumerate(steps, start=1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    if model is not None:
        (folder / "model.json").write_text(json.dumps(dict(model)))
    return folder


def columns(capsys, *arguments: str) -> list[dict]:
    assert summarise.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rejected(capsys, *arguments: str) -> str:
    """Return the single sentence of a rejection."""
    assert summarise.main(list(arguments)) == 2
    ended = capsys.readouterr()
    assert ended.out == "" and ended.err.startswith("error: ") and ended.err.count("\n") == 1
    return ended.err


def test_a_run_like_the_published_one_has_the_published_columns(tmp_path, capsys):
    """The first step compiles and is not counted; a 3-step job with 3 steps is complete."""
    slow = metrics(TRUE_WEIGHTS, **{"timing_s/step": 5000.0})
    run = write_run(tmp_path / "run", slow, metrics(TRUE_WEIGHTS), metrics(TRUE_WEIGHTS))
    found, true, random = columns(capsys, str(run))
    assert [column["name"] for column in (found, true, random)] == ["run", TRUE_WEIGHTS.name, RANDOM_WEIGHTS.name]
    assert found["steps"] == "steps 2-3" and found["dies"] == 256
    seconds = found["statistics"]["seconds"]
    assert seconds == pytest.approx(true["statistics"]["seconds"], abs=0.03)
    assert sum(seconds.values()) == pytest.approx(found["statistics"]["total"])
    system = {"system": 123.16, "trained": 123.16}
    assert found["per_card"] == pytest.approx({"rollout": 270.05, "training": 331.6, **system}, abs=0.05)
    assert found["per_die"] == pytest.approx({name: rate / 2 for name, rate in found["per_card"].items()})
    # As verl prints it: a rate per die. verl knows no MFU here.
    assert found["per_die"]["system"] == pytest.approx(metrics(TRUE_WEIGHTS)["perf/throughput"])
    assert found["mfu"] == pytest.approx(true["mfu"]) and 0.05 < found["mfu"] < 0.5
    assert found["statistics"]["truncated"] == 0.25
    assert found["notes"] == [
        "weights that were read, responses end where the model ends them, experts chosen by the router, "
        "4 layers of a stage recomputed",
        "the stages include 20.00 s of moving tensors to and from the host",
    ]


def test_saving_and_validation_are_told_apart(tmp_path, capsys):
    """One of two steps validates for 200 s and saves for 100 s, within verl's step timer."""
    longer = {"timing_s/testing": 200.0, "timing_s/save_checkpoint": 100.0}
    longer["timing_s/step"] = TRUE_WEIGHTS.statistics.total + 300.0
    run = write_run(tmp_path / "run", metrics(TRUE_WEIGHTS), metrics(TRUE_WEIGHTS, **longer), metrics(TRUE_WEIGHTS))
    found, true, _ = columns(capsys, str(run))
    statistics, total = found["statistics"], TRUE_WEIGHTS.statistics.total
    assert statistics["aside"] == pytest.approx(150.0) and statistics["total"] == pytest.approx(total + 150.0)
    assert statistics["seconds"]["rest"] == pytest.approx(true["statistics"]["seconds"]["rest"], abs=0.03)
    assert found["per_card"]["trained"] == pytest.approx(123.16, abs=0.01)
    assert found["per_card"]["system"] == pytest.approx(123.16 * total / (total + 150.0), abs=0.01)
    assert true["statistics"]["aside"] is None and true["per_card"]["trained"] is None


def test_one_step_and_several_runs(tmp_path, capsys):
    first = write_run(tmp_path / "first", metrics(TRUE_WEIGHTS), metrics(RANDOM_WEIGHTS))
    second = write_run(tmp_path / "second", metrics(RANDOM_WEIGHTS))
    ours, other, *_ = columns(capsys, str(first), str(second), "--step", "1")
    assert ours["steps"] == other["steps"] == "step 1"
    assert ours["statistics"]["total"] == TRUE_WEIGHTS.statistics.total
    assert other["statistics"]["total"] == RANDOM_WEIGHTS.statistics.total
    assert "it has not finished its 3 steps" in ours["notes"]
    assert "first has no step 3: its steps are 1 to 2." in rejected(capsys, str(first), "--step", "3")


def test_the_benchmarks_conditions_are_told(tmp_path, capsys):
    config = configuration()
    node = config["actor_rollout_ref"]
    node["rollout"]["ignore_eos"] = node["overlay"]["router_balance"]["forced"] = True
    node["actor"]["load_weight"] = node["model"]["enable_gradient_checkpointing"] = False
    run = write_run(tmp_path / "run", metrics(RANDOM_WEIGHTS), config=config)
    assert columns(capsys, str(run))[0]["notes"][0] == (
        "random weights, ignore_eos, experts balanced by force, no layer recomputed"
    )


def test_mfu_needs_the_model_a_peak_and_real_dies(tmp_path, capsys):
    run = write_run(tmp_path / "run", metrics(TRUE_WEIGHTS), model=None)
    without = columns(capsys, str(run))[0]
    assert without["mfu"] is None and any("Pass --model" in note for note in without["notes"])
    (given := tmp_path / "config.json").write_text(json.dumps(dict(DEEPSEEK_V3)))
    usual, halved = (
        columns(capsys, str(run), "--model", str(given), *peak)[0]["mfu"] for peak in ((), ("--peak", "188"))
    )
    assert halved == pytest.approx(2 * usual)
    (run / "meters").mkdir()
    emulated = columns(capsys, str(run), "--model", str(given))[0]
    assert emulated["mfu"] is None and any("on emulated dies" in note for note in emulated["notes"])


def test_unmeasured_values_are_dashes(tmp_path, capsys):
    step = metrics(TRUE_WEIGHTS)
    for name in ("timing_s/reshard", "timing_s/offload", "response_length/clip_ratio"):
        del step[name]
    assert summarise.main([str(write_run(tmp_path / "run", step))]) == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith("  reshard"))
    assert row.split() == ["reshard", "-", "11.50", "11.18"]
    for condition in (*TRUE_WEIGHTS.conditions, *RANDOM_WEIGHTS.conditions):
        assert " ".join(condition.split()) in " ".join(printed.split())


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has no finished step"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "has no finished step"),
        (lambda run: (run / "metrics.jsonl").write_text('{"step": 1'), "has no finished step"),
        (lambda run: (run / "metrics.jsonl").write_text("garbage\n"), "line 1 is not a step record"),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n"), "metrics.jsonl cannot be read"),
        (
            lambda run: (run / "metrics.jsonl").write_text(
                '{"step": 1, "time": 0, "metrics": {"timing_s/step": null}}\n'
            ),
            "timing_s/step is missing in some steps",
        ),
        (lambda run: (run / "config.yaml").unlink(), "it has no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: [1"), "config.yaml cannot be read"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe"), "config.yaml cannot be read"),
        (lambda run: (run / "config.yaml").write_text("text"), "it has no keys"),
        (lambda run: (run / "config.yaml").write_text("data: 1"), "data.train_batch_size=None is invalid. Set it to"),
        (lambda run: (run / "model.json").write_text("[1]"), "model.json is not a model's config.json"),
        (lambda run: (run / "model.json").write_text("{"), "model.json is not a model's config.json"),
    ],
)
def test_garbage_is_one_sentence(tmp_path, capsys, damage, says):
    run = write_run(tmp_path / "run", metrics(TRUE_WEIGHTS))
    damage(run)
    assert says in rejected(capsys, str(run))


def test_no_run_is_one_sentence(tmp_path, capsys):
    assert "is not a folder. Pass the folder of a run" in rejected(capsys, str(tmp_path / "nothing"))
    (tmp_path / "file").touch()
    assert "is not a folder" in rejected(capsys, str(tmp_path / "file"))
    assert "has no config.yaml" in rejected(capsys, str(tmp_path))


@pytest.mark.parametrize("arguments", [[], ["run", "--peak", "0"], ["run", "--peak", "nan"], ["run", "--step", "x"]])
def test_wrong_arguments_are_two(arguments):
    with pytest.raises(SystemExit) as ended:
        summarise.main(arguments)
    assert ended.value.code == 2


def test_it_runs_from_anywhere_and_needs_no_torch(tmp_path):
    run = write_run(tmp_path / "run", metrics(TRUE_WEIGHTS))
    script = (
        "import sys; sys.modules['torch'] = None; import runpy; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(ROOT / "scripts" / "summarise.py"), str(run)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "tokens a second and card" in ended.stdout
