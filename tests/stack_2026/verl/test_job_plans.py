"""What the jobs of the stack 2026 need of a die: published sizes, what fits, and remedies that verl 0.9.1 knows."""

import json
import re

import pytest

from post_training.plan.verl_0_9_jobs import REMEDIES
from rehearsal.plan import ROOT
from scripts import plan
from tests.stack_2026.verl.test_jobs import MODELS, ONE_CARD, ONE_NODE, keys, model_folder
from verl_plugin.jobs import compose_job

# As the index of the published weights' files counts them; Qwen3-0.6B has its embedding once.
PARAMETERS = {ONE_CARD: 596_049_920, ONE_NODE: 30_532_122_624}
DIES = {ONE_CARD: 1, ONE_NODE: 16}


def planned(capsys, folder, job, *more):
    """The exit code, and what is printed as JSON."""
    file = model_folder(folder, job) / "config.json"
    code = plan.main(["--stack", "2026", "--config-name", job, "--model", str(file), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("job", MODELS)
def test_state_is_that_of_the_published_parameters(capsys, tmp_path, job):
    code, found = planned(capsys, tmp_path, job)
    assert code == 0 and max(found["phases"].values()) < found["die"] == 61 << 30
    # FSDP2 shards float32 weights; Megatron's distributed optimizer has them as main parameters.
    each = 8 if job == ONE_CARD else 12
    # Norms and routers of Megatron lie on several dies, whose optimizers share them.
    assert found["optimizer"] * DIES[job] == pytest.approx(each * PARAMETERS[job], rel=1e-3)


def test_weights_of_a_die_are_its_experts_and_half_of_the_rest(capsys, tmp_path):
    _, found = planned(capsys, tmp_path, ONE_NODE)
    model = MODELS[ONE_NODE]
    expert = 3 * model["hidden_size"] * model["moe_intermediate_size"]
    experts = model["num_hidden_layers"] * model["num_experts"] * expert
    dense = PARAMETERS[ONE_NODE] - experts
    assert found["weights_training"] == pytest.approx(2 * (experts / 16 + dense / 2), rel=0.01)
    assert found["gradients"] == 2 * found["weights_training"]
    assert found["weights_rollout"] == pytest.approx(2 * PARAMETERS[ONE_NODE] / 4, rel=0.01)


def test_hand_over_is_part_of_the_reshard(capsys, tmp_path):
    key = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
    for job in MODELS:
        sizes = [planned(capsys, tmp_path, job, f"{key}={size}")[1]["phases"]["reshard"] for size in (256, 768)]
        assert sizes[1] - sizes[0] == 512 << 20


@pytest.mark.parametrize(("job", "less"), [(ONE_CARD, "16GiB"), (ONE_NODE, "32GiB")])
def test_job_that_does_not_fit_names_a_key(capsys, tmp_path, job, less):
    file = model_folder(tmp_path, job) / "config.json"
    arguments = ["--stack", "2026", "--config-name", job, "--model", str(file), "--die-memory", less]
    assert plan.main(arguments) == 1
    assert "DOES NOT FIT: update: " in capsys.readouterr().out


def test_remedies_name_keys_of_verl():
    known = set().union(*(keys(compose_job(job)) for job in MODELS))
    for remedy in REMEDIES.values():
        for key in re.findall(r"(?:actor_rollout_ref|trainer|additional_config)\.[\w.]+", remedy):
            assert any(each.endswith(key) for each in known), key


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--time"], "--time is invalid with --stack 2026"),
        (["--fewer-nodes"], "--fewer-nodes is invalid with --stack 2026"),
        (["actor_rollout_ref.actor.megatron.param_offload=false"], "param_offload=false is invalid for a plan"),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "algorithm.adv_estimator=gae is invalid for a plan"),
        (["trainer.n_gpus_per_node=12"], "is invalid"),
    ],
)
def test_what_is_not_planned_is_one_sentence(capsys, tmp_path, more, says):
    file = model_folder(tmp_path, ONE_NODE) / "config.json"
    assert plan.main(["--stack", "2026", "--config-name", ONE_NODE, "--model", str(file), *more]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1, said


@pytest.mark.parametrize("page", ["first-hour-2026.md", "first-hour-2026.zh.md"])
def test_numbers_of_the_page_are_those_of_the_plan(capsys, tmp_path, page):
    cells = [line.split("|")[2:4] for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    shown = [[re.findall(r"\d+\.\d", cell) for cell in row] for row in cells]
    for column, job in enumerate((ONE_CARD, ONE_NODE)):
        _, found = planned(capsys, tmp_path, job)
        phases = found["phases"]
        names = ("weights", "engine_weights") if job == ONE_CARD else ("weights_training", "weights_rollout")
        weights = [found[name] for name in names]
        state = [found["gradients"], found["optimizer"]]
        rows = [weights, state, [found["kv_cache"]], *([phases[name]] for name in ("reshard", "rollout", "update"))]
        expected = [[f"{size / 1e9:.1f}" for size in row] for row in rows]
        assert all(row in [each[column] for each in shown] for row in expected), expected
