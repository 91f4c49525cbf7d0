"""Device memory of the stack 2026's jobs: published sizes, jobs that fit, and remedies that verl 0.9.1 supports."""

import contextlib
import io
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from post_training.plan.sync_time import FASTEST, PUBLISHED, SLOWEST
from post_training.plan.verl_0_9_jobs import MEGATRON_REMEDIES, REMEDIES
from rehearsal.plan import ROOT
from scripts import plan
from tests.stack_2026.verl.test_jobs import (
    ACTOR,
    CLUSTER,
    DIES_128,
    DIES_256,
    MODELS,
    ONE_CARD,
    ONE_NODE,
    keys,
    model_folder,
)
from verl_plugin.jobs import compose_job
from verl_plugin.offload import LIBRARY as OFFLOAD

STAYS = "actor_rollout_ref.actor.megatron.param_offload=false"
CRITIC = ("algorithm.adv_estimator=gae", "critic.enable=false")
# Counts from the index of the published weight files; Qwen3-0.6B has its embedding once.
PARAMETERS = {ONE_CARD: 596_049_920, ONE_NODE: 30_532_122_624, DIES_256: 671_026_419_200, DIES_128: 235_093_634_560}
DIES = {ONE_CARD: 1, ONE_NODE: 16, DIES_256: 256, DIES_128: 128}
FILE_2026 = ROOT / "scripts" / "env" / "a3_256_dies_2026.env"


@cache
def planned(job, *more):
    """Return a plan's exit code and its JSON output. Cached, as a plan of 256 dies takes seconds."""
    said = io.StringIO()
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(said):
        file = model_folder(Path(folder), job) / "config.json"
        code = plan.main(["--stack", "2026", "--config-name", job, "--model", str(file), "--json", *more])
    return code, json.loads(said.getvalue())


@pytest.mark.parametrize("job", MODELS)
def test_state_is_that_of_the_published_parameters(job):
    code, found = planned(job)
    assert code == 0 and max(found["phases"].values()) < found["die"] == 61 << 30
    # FSDP2 shards float32 weights; Megatron's distributed optimizer keeps them as main parameters.
    each = 8 if job == ONE_CARD else 12
    # Megatron's norms and routers are replicated on several dies, whose optimizers shard them; stages differ.
    assert found["optimizer"] * DIES[job] == pytest.approx(each * PARAMETERS[job], rel=0.12 if job in CLUSTER else 1e-3)


def test_671b_fits_with_its_optimizer_on_the_host_alone(capsys, tmp_path):
    key = f"{ACTOR}.optim.override_optimizer_config"
    code, found = planned(DIES_256, "--cluster", str(FILE_2026))
    on_die, other = planned(DIES_256, "--cluster", str(FILE_2026), f"{key}.optimizer_cpu_offload=false")
    assert (code, on_die) == (0, 1)
    # With Adam's state on the die the update also needs a temporary; without it the activations set the peak.
    assert other["phases"]["update"] - found["phases"]["update"] > found["optimizer"]
    file = model_folder(tmp_path, DIES_256) / "config.json"
    arguments = [
        "--stack",
        "2026",
        "--config-name",
        DIES_256,
        "--model",
        str(file),
        f"{key}.optimizer_cpu_offload=false",
    ]
    assert plan.main(arguments) == 1
    assert f"set {key}.optimizer_cpu_offload=true" in capsys.readouterr().out
    assert plan.main([*arguments[:-1], f"{key}.optimizer_offload_fraction=0.5"]) == 2
    assert "optimizer_offload_fraction=0.5 is invalid for a plan" in capsys.readouterr().err


@pytest.mark.parametrize("job", CLUSTER)
def test_sync_is_timed_from_the_bytes_of_the_plan(capsys, tmp_path, job):
    _, memory = planned(job)
    code, found = planned(job, "--time")
    assert code == 0
    # No die receives more than it serves, but some send more than they receive.
    assert found["received"] < memory["weights_rollout"] < 1.1 * found["received"]
    most = max(found["received"], found["sent"])
    assert found["fastest"] * FASTEST == pytest.approx(most) == found["slowest"] * SLOWEST
    assert all(row["source"] and row["hardware"] and row["conditions"] for row in found["published"])
    assert len(found["published"]) == len(PUBLISHED) and found["unknown"]
    file = model_folder(tmp_path, job) / "config.json"
    assert plan.main(["--stack", "2026", "--config-name", job, "--model", str(file), "--time"]) == 0
    said = capsys.readouterr().out
    assert f"{found['fastest']:.1f} to {found['slowest']:.1f} s, modelled" in said and said.count("not known: ") == 3


def test_weights_of_a_die_are_its_experts_and_half_of_the_rest():
    _, found = planned(ONE_NODE)
    model = MODELS[ONE_NODE]
    expert = 3 * model["hidden_size"] * model["moe_intermediate_size"]
    experts = model["num_hidden_layers"] * model["num_experts"] * expert
    dense = PARAMETERS[ONE_NODE] - experts
    assert found["weights_training"] == pytest.approx(2 * (experts / 16 + dense / 2), rel=0.01)
    assert found["gradients"] == 2 * found["weights_training"]
    assert found["weights_rollout"] == pytest.approx(2 * PARAMETERS[ONE_NODE] / 4, rel=0.01)


def test_hand_over_is_part_of_the_reshard():
    key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    for job in (ONE_CARD, ONE_NODE):
        sizes = [planned(job, f"{key}={size}")[1]["phases"]["reshard"] for size in (256, 768)]
        assert sizes[1] - sizes[0] == 512 << 20


@pytest.mark.parametrize(("job", "less"), [(ONE_CARD, "16GiB"), (ONE_NODE, "32GiB")])
def test_job_that_does_not_fit_names_a_key(capsys, tmp_path, job, less):
    file = model_folder(tmp_path, job) / "config.json"
    arguments = ["--stack", "2026", "--config-name", job, "--model", str(file), "--die-memory", less]
    assert plan.main(arguments) == 1
    assert "DOES NOT FIT: update: " in capsys.readouterr().out


def test_remedies_name_keys_of_verl():
    known = set().union(*(keys(compose_job(job)) for job in MODELS))
    for remedy in (*REMEDIES.values(), *MEGATRON_REMEDIES.values()):
        for key in re.findall(r"(?:actor_rollout_ref|trainer|additional_config)\.[\w.]+", remedy):
            assert any(each.endswith(key) for each in known), key


def without_offload() -> str:
    """Return the override that removes this project's offload manager, leaving all offloading to verl."""
    libraries = compose_job(ONE_NODE).actor_rollout_ref.model.external_lib
    return f"actor_rollout_ref.model.external_lib=[{','.join(each for each in libraries if each != OFFLOAD)}]"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--time", "--picture", "x.svg"], "--picture is invalid with --stack 2026"),
        (["--fewer-nodes"], "--fewer-nodes is invalid with --stack 2026"),
        ([STAYS], f"param_offload=False is invalid: with {OFFLOAD}"),
        ([STAYS, without_offload()], "param_offload=false is invalid for a plan"),
        ([*CRITIC], f"algorithm.adv_estimator=gae is invalid: {OFFLOAD} does not"),
        ([*CRITIC, without_offload()], "algorithm.adv_estimator=gae is invalid for a plan"),
        (["trainer.n_gpus_per_node=12"], "is invalid"),
    ],
)
def test_unplannable_job_rejected_in_one_sentence(capsys, tmp_path, more, says):
    file = model_folder(tmp_path, ONE_NODE) / "config.json"
    assert plan.main(["--stack", "2026", "--config-name", ONE_NODE, "--model", str(file), *more]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("language", ["", ".zh"])
@pytest.mark.parametrize("page", ["first-hour-2026", "cluster-2026"])
def test_numbers_of_the_page_are_those_of_the_plan(page, language):
    text = (ROOT / "docs" / f"{page}{language}.md").read_text()
    cells = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")]
    shown = [[re.findall(r"\d+\.\d", cell) for cell in row] for row in cells]
    more = ("--cluster", str(FILE_2026)) if page == "cluster-2026" else ()
    for column, job in enumerate(CLUSTER if more else (ONE_CARD, ONE_NODE)):
        _, found = planned(job, *more)
        phases = found["phases"]
        names = ("weights", "engine_weights") if job == ONE_CARD else ("weights_training", "weights_rollout")
        weights = [found[name] for name in names]
        state = [found["gradients"], found["optimizer"]]
        rows = [weights, state, [found["kv_cache"]], *([phases[name]] for name in ("reshard", "rollout", "update"))]
        expected = [[f"{size / 1e9:.1f}" for size in row] for row in rows]
        assert all(row in [each[column] for each in shown] for row in expected), expected
