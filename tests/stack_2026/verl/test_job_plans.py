"""Device memory of the stack 2026's jobs: published sizes, jobs that fit, and remedies that verl 0.9.1 supports."""

import contextlib
import io
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from post_training.plan.activations import training_activations
from post_training.plan.outside_torch import communicators
from post_training.plan.sync_time import FASTEST, PUBLISHED, SLOWEST
from post_training.plan.verl_0_9_jobs import MEGATRON_REMEDIES, REMEDIES, read_verl_0_9_job
from rehearsal.plan import ROOT
from scripts import plan
from tests.stack_2026.verl.test_jobs import (
    ACTOR,
    CLUSTER,
    CONTEXT,
    DIES_128,
    DIES_256,
    MODELS,
    ONE_CARD,
    ONE_NODE,
    TRANSFORMER,
    keys,
    model_folder,
)
from verl_plugin.jobs import check_job, compose_job
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


# 2K + 32K tokens, by the number of dies that share a sequence.
LONG = ("data.max_prompt_length=2048", "data.max_response_length=32768")
LATENT = f"+{TRANSFORMER}.multi_latent_attention=true"


def long_job(job, context):
    """Return a job with long answers, each of whose dies has at most 34816 / `context` tokens of a micro batch."""
    more = [*LONG, f"{CONTEXT}={context}", f"{ACTOR}.ppo_max_token_len_per_gpu={34816 // context}"]
    config = check_job(compose_job(job, [*more, LATENT] if job == DIES_256 else more), MODELS[job])
    return read_verl_0_9_job(config, MODELS[job])


# Bytes that ring attention adds on a die: five sets of keys and values over TP4, in two bytes. Qwen3-235B-A22B has four
# heads of 128 for each; DeepSeek-V3 has 128 heads, with keys of 192 and values of 128.
@pytest.mark.parametrize(
    ("job", "context", "tokens", "ring"),
    [
        (DIES_128, 4, 8704, 5 * 8704 * 2 * 4 * 128 // 4 * 2),
        (DIES_256, 8, 4352, 5 * 4352 * 128 * (192 + 128) // 4 * 2),
    ],
)
def test_dies_that_share_sequences_have_their_part_of_the_tokens(job, context, tokens, ring):
    whole, shared = long_job(job, 1), long_job(job, context)
    # One sequence is a micro batch, in the update and in the reference.
    assert (
        [each.micro_update for each in (whole, shared)] == [each.micro_reference for each in (whole, shared)] == [1, 1]
    )
    assert (whole.training_tokens(1), shared.training_tokens(1)) == (34816, tokens)
    assert whole.train == shared.train  # what weights, gradients and the optimizer take
    for stage in (0, 7):
        # Activations are proportional to tokens, which these sizes divide without a remainder.
        assert training_activations(shared, stage) - ring == training_activations(whole, stage) // context
    names = [{each.name for each in communicators(every)} for every in (whole, shared)]
    added = {"training: sequences", *(f"training: {side} neighbour in sequences" for side in ("one", "other"))}
    assert names[1] - names[0] == added  # all replicas share their sequences


def test_two_dies_share_a_sequence_and_replicas_are_left():
    job = long_job(DIES_256, 2)
    names = {each.name: each.ranks for each in communicators(job)}
    assert names["training: replicas"] == 4 and names["training: gradients"] == 8
    assert "training: other neighbour in sequences" not in names


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


@pytest.mark.parametrize("language", ["", ".zh"])
def test_numbers_of_long_context_are_those_of_the_plan(language):
    """Compare the table's cells "reference / update", one for each number of dies that share a sequence."""
    text = (ROOT / "docs" / f"new-in-2026{language}.md").read_text()
    rows = ((DIES_128, "| Qwen3-235B-A22B", (1, 2, 4)), (DIES_256, "| DeepSeek-V3-671B", (1, 2, 4, 8)))
    for job, row, numbers in rows:
        [line] = [each for each in text.splitlines() if each.startswith(row)]
        shown = line.split("|")[2:]
        for context, cell in zip(numbers, shown, strict=False):
            more = [*LONG, f"{CONTEXT}={context}", f"{ACTOR}.ppo_max_token_len_per_gpu={34816 // context}"]
            more += [LATENT] if job == DIES_256 else []
            code, found = planned(job, "--cluster", str(FILE_2026), *more)
            phases = [f"{found['phases'][name] / 1e9:.1f}" for name in ("ref", "update")]
            assert code == 0 and re.findall(r"\d+\.\d", cell) == phases, (job, context, cell)
