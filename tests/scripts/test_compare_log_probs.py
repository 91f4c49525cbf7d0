"""scripts/compare_log_probs.py: what it rejects, which workers it starts, and its report on two dumps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from post_training import claimed_dies
from post_training.mismatch import points
from post_training.mismatch.dumps import read_dump, write_dump
from post_training.mismatch.points import of_layer
from scripts import compare_log_probs
from tests.html_pages import StrictPage
from tests.post_training.mismatch.synthetic import SEQUENCES, changed, dump

# Stands in for the ranks, with both sides of a made-up model prepared in each dtype.
WORKER = """
import json, shutil, sys
from pathlib import Path
import yaml
asked, here = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[0]).parent
dtype = yaml.safe_load(Path(asked["config"]).read_text())["actor_rollout_ref"]["rollout"]["dtype"]
for side, file in asked["outputs"].items():
    shutil.copy(here / "ready" / f"{side}.{dtype}", file)
shutil.copy(asked["config"], here / f"seen.{dtype}.yaml")
(here / "request.json").write_text(json.dumps(asked))
"""


@pytest.fixture
def files(tmp_path):
    """Write a dump of each side, and one of the rollout in which the attention of layer 1 is wrong."""
    for side in ("rollout", "training"):
        write_dump(tmp_path / side, dump(side))
    wrong = changed(dump("rollout"), of_layer(1, points.ATTENTION), lambda values: values * 2)
    write_dump(tmp_path / "wrong", wrong)
    return tmp_path


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Prepare a run's folder with its model, and a worker that computes nothing; in bfloat16 the rollout is wrong."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": 20}))
    rollout = {"dtype": "bfloat16", "temperature": 1.0, "max_num_batched_tokens": 64, "enforce_eager": False}
    rollout |= {"log_prob_use_dynamic_bsz": True, "prompt_length": 2, "response_length": 2, "max_model_len": 4}
    node = {
        "actor": {"strategy": "megatron", "recompute_old_log_prob": False},
        "rollout": rollout,
        "model": {"path": str(folder / "model")},
    }
    node["overlay"] = {"precision": "bfloat16", "measure": {"output_dir": "somewhere"}}
    node["overlay"]["sample_handles"] = {"enabled": True}
    config = {"trainer": {"nnodes": 1, "n_gpus_per_node": 4}, "actor_rollout_ref": node}
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    lines = [json.dumps({"prompt": each.prompt, "response": each.response}) for each in SEQUENCES]
    (folder / "tokens.jsonl").write_text("\n".join([*lines, ""]))
    for side in ("rollout", "training"):
        for dtype in ("float32", "bfloat16"):
            made = dump(side, dtype)
            if (side, dtype) == ("rollout", "bfloat16"):
                made = changed(made, of_layer(1, points.MLP), lambda values: values * 2)
            write_dump(tmp_path / "ready" / f"{side}.{dtype}", made)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(compare_log_probs, "_WORKER", tmp_path / "worker.py")
    return folder


def compared(tmp_path, *arguments):
    return compare_log_probs.main([*map(str, arguments), "--output", str(tmp_path / "out")])


def both(files, rollout="rollout"):
    return "--rollout-dump", files / rollout, "--training-dump", files / "training"


def test_two_dumps_are_compared_on_any_machine(files, capsys):
    assert compared(files, *both(files)) == 0
    assert "agree at all" in capsys.readouterr().out
    assert json.loads((files / "out" / "comparison.json").read_text())["comparisons"][0]["first"] is None


def test_where_they_part_is_said_written_and_drawn(files, capsys):
    assert compared(files, *both(files, "wrong")) == 1
    assert "layer 1, attention" in capsys.readouterr().out
    said = json.loads((files / "out" / "comparison.json").read_text())["comparisons"][0]
    assert said["first"] == of_layer(1, points.ATTENTION) and "layer 1, attention" in said["sentence"]
    page = StrictPage((files / "out" / "comparison.html").read_text())
    assert page.tags["svg"] >= 1 and "layer 1, attention" in page.text
    assert compared(files, *both(files, "wrong"), "--tolerance", 2) == 2  # the folder holds only one


def test_a_tolerance_of_ones_own_counts(files):
    assert compared(files, *both(files, "wrong"), "--tolerance", "2") == 0


def test_both_dtypes_are_computed_from_the_run(run, tmp_path, capsys):
    assert compared(tmp_path, run, "--tokens", run / "tokens.jsonl") == 1
    said = json.loads((tmp_path / "out" / "comparison.json").read_text())["comparisons"]
    assert [(each["dtype"], each["first"]) for each in said] == [("float32", None), ("bfloat16", "layers.1.mlp")]
    asked = json.loads((tmp_path / "request.json").read_text())
    assert asked["sequences"] == [[list(each.prompt), list(each.response)] for each in SEQUENCES]
    assert (asked["ranks"], asked["checkpoint"]) == (4, None)
    seen = OmegaConf.load(tmp_path / "seen.float32.yaml").actor_rollout_ref
    assert (seen.rollout.prompt_length, seen.rollout.response_length, seen.rollout.max_model_len) == (3, 3, 6)
    assert seen.rollout.enforce_eager and not seen.rollout.log_prob_use_dynamic_bsz
    assert seen.actor.recompute_old_log_prob and not seen.overlay.sample_handles.enabled
    assert seen.overlay.precision == seen.rollout.dtype == "float32" and seen.overlay.measure.output_dir == ""
    assert "float32" in capsys.readouterr().out


def test_one_side_is_dumped_and_held_against_the_other_later(run, tmp_path):
    tokens = ("--tokens", run / "tokens.jsonl", "--dtype", "float32")
    assert compared(tmp_path, run, *tokens, "--dump", "rollout", tmp_path / "dumped") == 0
    assert read_dump(tmp_path / "dumped").header.side == "rollout"
    assert list(json.loads((tmp_path / "request.json").read_text())["outputs"]) == ["rollout"]
    assert not (tmp_path / "out" / "comparison.json").exists()
    assert compared(tmp_path, run, "--rollout-dump", tmp_path / "dumped") == 0
    assert list(json.loads((tmp_path / "request.json").read_text())["outputs"]) == ["training"]


def test_a_checkpoint_is_given_to_the_ranks(run, tmp_path):
    step = run / "checkpoints" / "global_step_7"
    (step / "actor").mkdir(parents=True)
    arguments = (step, "--tokens", run / "tokens.jsonl", "--dtype", "float32")
    assert compared(tmp_path, *arguments) == 0
    assert json.loads((tmp_path / "request.json").read_text())["checkpoint"] == str(step / "actor")


def test_dies_of_another_job_are_not_taken(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_log_probs, "_emulated", lambda: False)
    monkeypatch.setattr(compare_log_probs, "run_to_the_end", lambda *_, **__: pytest.fail("nothing is started"))
    monkeypatch.setattr(claimed_dies, "devices_of_dies", lambda root: [tmp_path / f"davinci{die}" for die in range(4)])
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    with claimed_dies.claimed_dies(1, {"ASCEND_RT_VISIBLE_DEVICES": "3"}):
        assert compared(tmp_path, run, "--tokens", run / "tokens.jsonl", "--dtype", "float32") == 3
    assert "has die 3" in capsys.readouterr().err


def test_for_several_nodes_the_commands_are_printed(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_log_probs, "_emulated", lambda: False)
    arguments = (run, "trainer.nnodes=2", "--tokens", run / "tokens.jsonl", "--dtype", "bfloat16")
    assert compared(tmp_path, *arguments) == 0
    said = capsys.readouterr().out
    request = tmp_path / "out" / "bfloat16" / "request.json"
    assert f"--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HEAD:PORT {tmp_path}" in said
    asked = json.loads(request.read_text())
    assert str(request) in said and asked["ranks"] == 8 and Path(asked["config"]).is_file()
    assert all(f"--{side}-dump {file}" in said for side, file in asked["outputs"].items())


@pytest.mark.parametrize("change", ["actor_rollout_ref.model.path=model", None])
def test_ranks_read_the_model_that_was_checked(run, monkeypatch, change):
    """They start in the checkout: a path of the run counts from there, one of the user from the user's folder."""
    config = OmegaConf.load(run / "config.yaml")
    config.actor_rollout_ref.model.path = "models/qwen"
    OmegaConf.save(config, run / "config.yaml")
    monkeypatch.chdir(run)
    options = compare_log_probs.parse_arguments([str(run), *([change] if change else [])])
    expected = run / "model" if change else compare_log_probs.ROOT / "models" / "qwen"
    assert compare_log_probs._source(options).config.actor_rollout_ref.model.path == str(expected)


def test_a_dry_run_starts_nothing(run, tmp_path, capsys):
    assert compared(tmp_path, run, "--tokens", run / "tokens.jsonl", "--dry-run") == 0
    assert "2 sequences, 10 tokens" in capsys.readouterr().out
    assert not (tmp_path / "out").exists() and not (tmp_path / "request.json").exists()


@pytest.mark.parametrize(
    ("program", "word"),
    [("raise ValueError('no such layer')", "no such layer"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL ended")],
)
def test_ranks_that_fail_are_told_with_their_reason(run, tmp_path, program, word, capsys):
    (tmp_path / "worker.py").write_text(program)
    assert compared(tmp_path, run, "--tokens", run / "tokens.jsonl") == 3
    error = capsys.readouterr().err
    assert word in error and "float32.log" in error


def replaced(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "Pass a RUN"),
        (["--rollout-dump", "{files}/rollout"], "training cannot be computed"),
        (["--rollout-dump", "{files}/training"], "dump of training"),
        (["--rollout-dump", "{files}/nothing"], "cannot be read"),
        (["{files}"], "neither a run's folder"),
        (["{run}"], "--tokens is missing"),
        (["{run}", "--tokens", "{run}/nothing"], "No such file"),
        (["{run}", "--tokens", "{run}/config.yaml"], "not a JSON object"),
        (["{run}", "--tokens", "{run}/tokens.jsonl", "--limit", "0"], "--limit=0 is invalid"),
        (["{run}", "--tokens", "{run}/tokens.jsonl", "--tolerance", "nan"], "--tolerance=nan is invalid"),
        (["{run}", "--tokens", "{run}/tokens.jsonl", "--tolerance", "0"], "--tolerance=0 is invalid"),
        (["{run}", "--tokens", "{run}/tokens.jsonl", "--tolerance", "10"], "--tolerance=10 is invalid"),
        (["{run}", "trainer.nodes=2", "--tokens", "{run}/tokens.jsonl"], "nodes"),
        (["{run}", "trainer.n_gpus_per_node=256", "--tokens", "{run}/tokens.jsonl"], "256 dies"),
        (["{run}", "actor_rollout_ref.actor.strategy=fsdp", "--tokens", "{run}/tokens.jsonl"], "with Megatron"),
        (
            ["{run}", "--tokens", "{run}/tokens.jsonl", "--dump", "reference", "x"],
            "--dump=reference is invalid. Set it to",
        ),
        (["{run}", "--tokens", "{run}/tokens.jsonl", "--dump", "rollout", "x"], "one dtype"),
        (["{run}", "--rollout-dump", "{files}/rollout", "--dump", "rollout", "x"], "read from a dump"),
        (["{run}", "--rollout-dump", "{files}/rollout", "--tokens", "x"], "contains its tokens"),
        (["{run}", "--rollout-dump", "{files}/rollout", "--dtype", "bfloat16"], "in float32"),
        (["{run}", "--rollout-dump", "{files}/rollout", "--training-dump", "{files}/training"], "is not needed"),
        (["{run}/model", "--tokens", "{run}/tokens.jsonl"], "no checkpoint of an actor"),
    ],
)
def test_unworkable_settings_rejected_in_one_sentence(files, run, arguments, word, capsys):
    assert compared(files, *(each.format(files=files, run=run) for each in arguments)) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1
    assert not (files / "request.json").exists()


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"prompt": [1]}', '"response"'),
        ('{"prompt": [], "response": [1]}', "not empty"),
        ('{"prompt": [1], "response": [1.5]}', "token ids"),
        ('{"prompt": [20], "response": [1]}', "20 is not a token"),
        ('{"prompt": [0, -1], "response": [1]}', "-1 is not a token of a vocabulary of 20"),
        ("[1]", "not a JSON object"),
        ("", "no line"),
    ],
)
def test_lines_that_are_no_tokens_rejected(run, tmp_path, line, word, capsys):
    assert compared(tmp_path, run, "--tokens", replaced(tmp_path / "tokens", line)) == 2
    assert word in capsys.readouterr().err


def test_dumps_of_other_tokens_detected(files, capsys):
    from dataclasses import replace

    write_dump(files / "wrong", replace(dump("rollout"), sequences=SEQUENCES[::-1]))
    assert compared(files, *both(files, "wrong")) == 3
    assert "different tokens" in capsys.readouterr().err


@pytest.mark.exhaustive("starts four ranks for each family and dtype, and once more for a checkpoint of a training")
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen2"])
def test_rollout_and_training_of_tiny_models_agree_on_emulated_dies(model, tmp_path):
    from rehearsal.plan import DEFAULT_TRAIN_DATA, Options, make_plan
    from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
    from verl_patches.trainer.main_ppo import compose

    request = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, "bfloat16", model_type=model, warm_start=None)
    weights = make_checkpoint(request, tmp_path / "model", lambda step, loss: None).path
    plan = make_plan(Options(model=model, output=tmp_path / "run"), "unused")
    config = compose(plan.job.configuration, [*plan.overrides, f"actor_rollout_ref.model.path={weights}"])
    (tmp_path / "run").mkdir()
    OmegaConf.save(config, tmp_path / "run" / "config.yaml", resolve=True)
    lines = [{"prompt": f"{index} + {index % 3} = ", "response": str(index) * (1 + index % 5)} for index in range(6)]
    tokens = replaced(tmp_path / "tokens", "\n".join(map(json.dumps, lines)))
    assert compared(tmp_path, tmp_path / "run", "--tokens", tokens) == 0
    said = json.loads((tmp_path / "out" / "comparison.json").read_text())["comparisons"]
    assert [(each["dtype"], each["first"]) for each in said] == [("float32", None), ("bfloat16", None)]
    worst = {each["dtype"]: {point["point"]: point["worst"] for point in each["results"]} for each in said}
    assert 0 < worst["float32"]["final_norm"] < 1e-4 < worst["bfloat16"]["final_norm"]
