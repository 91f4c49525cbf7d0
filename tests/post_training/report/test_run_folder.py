"""A run's folder is read into statistics that match hand-computed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from post_training.report.metrics import ReportError
from post_training.report.rates import StepStatistics
from post_training.report.run_folder import Run, read_run

SECONDS = {
    "timing_s/step": 100.0,
    "timing_s/gen": 40.0,
    "timing_s/reshard": 4.0,
    "timing_s/old_log_prob": 5.0,
    "timing_s/ref": 6.0,
    "timing_s/reward": 1.0,
    "timing_s/adv": 0.5,
    "timing_s/update_actor": 20.0,
    "timing_s/offload": 7.0,
    "timing_s/save_checkpoint": 10.0,
    "timing_s/testing": 2.0,
}
LENGTHS = {"prompt_length/mean": 80.0, "response_length/mean": 1000.0, "response_length/clip_ratio": 0.25}
MODEL = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}


def configuration(**trainer: object) -> dict[str, object]:
    """Return a configuration as verl writes it, with the keys that are read."""
    return {
        "data": {"train_batch_size": 6},
        "actor_rollout_ref": {
            "model": {
                "path": "/nowhere",
                "enable_gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"activations_checkpoint_num_layers": 4},
            },
            "rollout": {"n": 4, "ignore_eos": True},
            "overlay": {"router_balance": {"forced": True}},
            "actor": {"load_weight": False},
        },
        "trainer": {"n_gpus_per_node": 8, "nnodes": 3, "total_training_steps": 3, **trainer},
    }


def step(number: int, **changed: float | None) -> dict[str, object]:
    """Return a line of metrics.jsonl; names in `changed` omit the part before the slash."""
    metrics: dict[str, float | None] = {**SECONDS, **LENGTHS}
    for name, value in changed.items():
        (known,) = (each for each in metrics if each.endswith(f"/{name}"))
        metrics[known] = value
    return {"step": number, "time": 1000.0 + number, "metrics": metrics}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that validated and then completed its three steps, of which the first took 10 times as long."""
    run = tmp_path / "night"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(configuration()))
    (run / "model.json").write_text(json.dumps(MODEL))
    validation = {"step": 0, "time": 1000.0, "metrics": {"val-core/acc": 0.5}}
    steps = [validation, step(1, step=1000.0), step(2), step(3, gen=60.0, step=120.0, save_checkpoint=None)]
    write_steps(run, steps)
    return run


def write_steps(run: Path, steps: list[dict[str, object]]) -> None:
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps))


CONDITIONS = (
    "random weights, responses end where the model ends them, experts balanced by force, 4 layers of a stage recomputed"
)


def test_run_is_the_means_of_all_steps_but_the_first(folder):
    seconds = {
        "rollout": 46.0,  # (40 + 60) / 2 without the reshard's 4
        "old_log_prob": 5.0,
        "ref": 6.0,
        "reward": 1.0,
        "adv": 0.5,
        "update": 20.0,
        "reshard": 4.0,
        "rest": 110.0 - 7.0 - 82.5,  # saving and validation are 12 and 2
    }
    assert read_run(folder) == Run(
        name="night",
        dies=24,
        steps=(2, 3),
        planned_steps=None,
        statistics=StepStatistics(24, 80.0, 1000.0, 0.25, seconds, 110.0, 7.0),
        offload=7.0,
        model=MODEL,
        emulated=False,
        conditions=CONDITIONS.replace("responses end where the model ends them", "ignore_eos"),
    )


def test_one_step_is_that_step_alone(folder):
    run = read_run(folder, step=1)
    assert run.steps == (1,) and run.statistics.total == 1000.0 and run.statistics.seconds["rollout"] == 36.0
    with pytest.raises(ReportError, match="has no step 4: its steps are 1 to 3"):
        read_run(folder, step=4)


def test_a_step_that_was_made_again_counts_as_it_was_last(folder):
    write_steps(folder, [step(1), step(2, step=200.0), step(2, step=150.0)])
    assert read_run(folder, step=2).statistics.total == 150.0


def test_the_only_step_of_a_run_counts(folder):
    write_steps(folder, [step(1)])
    run = read_run(folder)
    assert run.steps == (1,) and run.planned_steps == 3


@pytest.mark.parametrize("planned, left", [(2, None), (3, None), (4, 4), (None, None)])
def test_planned_steps_are_said_of_a_run_that_has_fewer(folder, planned, left):
    (folder / "config.yaml").write_text(yaml.safe_dump(configuration(total_training_steps=planned)))
    assert read_run(folder).planned_steps == left


@pytest.mark.parametrize(
    "key, value, text",
    [
        ("actor.load_weight", True, ("random weights", "weights that were read")),
        ("actor.load_weight", None, ("random weights", "weights that were read")),
        ("rollout.ignore_eos", False, ("ignore_eos", "responses end where the model ends them")),
        ("overlay.router_balance.forced", False, ("balanced by force", "chosen by the router")),
        ("model.enable_gradient_checkpointing", False, ("4 layers of a stage recomputed", "no layer recomputed")),
    ],
)
def test_each_condition_is_reported(folder, key, value, text):
    config = configuration()
    *path, last = key.split(".")
    node = config["actor_rollout_ref"]
    for name in path:
        node = node[name]
    node[last] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    stands = CONDITIONS.replace("responses end where the model ends them", "ignore_eos")
    assert read_run(folder).conditions == stands.replace(*text)


def test_emulated_run_and_another_model_are_known(folder, tmp_path):
    (folder / "meters").mkdir()
    (folder / "model.json").unlink()
    run = read_run(folder)
    assert run.emulated and run.model is None
    given = tmp_path / "config.json"
    given.write_text('{"hidden_size": 1}')
    assert read_run(folder, model=given).model == {"hidden_size": 1}


def test_step_without_lengths_makes_no_table(folder):
    write_steps(folder, [step(1), step(2), step(3, step=None)])
    with pytest.raises(ReportError, match=r"timing_s/step is missing in some steps, so no table can be made"):
        read_run(folder)
