"""`plan.py --time`: the step time of a configured job on clusters of 1 to 4096 dies, and its chart."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import pytest

from post_training.plan.job import read_job
from post_training.plan.step_time import text
from post_training.plan.step_time.configured import read_cluster, step_job
from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.model import STAGES, fitted, step_parts, step_seconds
from post_training.plan.step_time.picture import draw_time
from post_training.plan.step_time.published import PUBLISHED_CLUSTER, published_job
from post_training.plan.step_time.text import describe_time, largest_parts
from post_training.report.flops import forward_flops
from tests.post_training.plan.test_plan import MODEL
from tests.scripts.cluster_files import ROOT, load_script
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

DEEPSEEK = json.loads(MODEL.read_text())
LINE = ["--config-name", "deepseek_v3_256die_true_weight", "--model", str(MODEL)]
GRAPHS = "rollout.engine_kwargs.vllm.additional_config.torchair_graph_config"

SIZES = tuple(str(PUBLISHED_CLUSTER.dies * quarters // 4) for quarters in (1, 2, 4, 8, 16))


@pytest.fixture(scope="module")
def true_weights():
    return resolved(compose("deepseek_v3_256die_true_weight", []))


def cluster_file(folder, nodes, dies_per_node):
    path = folder / "cluster.env"
    path.write_text(f"NODES={nodes}  # nodes\nDIES_PER_NODE={dies_per_node}  # dies\n")
    return path


@pytest.mark.parametrize("dies", [1, 2, 16, 4096])
def test_every_cluster_has_a_step(dies, true_weights):
    cluster = Cluster(dies)
    text = describe_time(step_job(true_weights, read_job(true_weights, DEEPSEEK), DEEPSEEK, cluster, 78, 1500), cluster)
    assert text.startswith("modelled step") and "what is next to make faster" in text


@pytest.mark.parametrize(
    ("keys", "value", "stage", "longer"),
    [
        ("overlay.dp_sync.enabled", False, "rollout", True),
        ("rollout.enforce_eager", True, "rollout", False),
        (
            "rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.enable_multistream_moe",
            0,
            "rollout",
            True,
        ),
        (f"{GRAPHS}.enabled", False, "rollout", True),
        ("model.enable_gradient_checkpointing", False, "update", False),
        ("actor.recompute_old_log_prob", True, "old_log_prob", True),
        ("overlay.router_balance.forced", True, "ref", False),
        ("overlay.shared_chunks.enabled", False, "update", True),
    ],
)
def test_a_setting_of_the_job_reaches_the_model(keys, value, stage, longer, true_weights):
    def seconds(config):
        step = step_job(config, read_job(config, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, 1500)
        return step_seconds(step, PUBLISHED_CLUSTER)[stage]

    config = copy.deepcopy(true_weights)
    *folders, last = keys.split(".")
    node = config["actor_rollout_ref"]
    for folder in folders:
        node = node[folder]
    node[last] = value
    usual, changed = seconds(true_weights), seconds(config)
    # torchair's graphs take precedence over `enforce_eager`, which then has no effect.
    assert changed == usual if keys.endswith("eager") else (changed > usual) == longer and changed != usual


@pytest.mark.parametrize("enabled", [False, True])
def test_whether_requests_change_engines_reaches_the_model(enabled, true_weights):
    config = copy.deepcopy(true_weights)
    config["actor_rollout_ref"]["overlay"]["rollout_rebalance"]["enabled"] = enabled
    step = step_job(config, read_job(config, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, 1500)
    assert step.rebalanced == enabled


@pytest.mark.parametrize(("dies", "replicas"), [(32, 1), (64, 2), (256, 8), (512, 16)])
def test_data_parallelism_grows_with_the_cluster(dies, replicas, true_weights):
    """There are dies / (TP4 x PP8) replicas; the micro batches per replica determine the pipeline bubble."""
    cluster = Cluster(dies)
    step = step_job(true_weights, read_job(true_weights, DEEPSEEK), DEEPSEEK, cluster, 78, 1500)
    assert step.dp == replicas
    batches = 512 * 16 / replicas
    work = 8192 * forward_flops(DEEPSEEK, 1578) / dies * (8 * 8 / 61) * (batches + 7) / batches
    passes = 3 + step.recomputed / 8
    computing = step_parts(step, cluster)["update"]["computing"]
    assert computing == pytest.approx(passes * work / fitted().update_flops * fitted().update_imbalance)


def test_several_graphs_and_rebalance_reach_the_seconds(true_weights):
    def rollout(sizes, moves):
        config = copy.deepcopy(true_weights)
        node = config["actor_rollout_ref"]
        engine = node["rollout"]["engine_kwargs"]["vllm"]
        engine["additional_config"]["torchair_graph_config"]["graph_batch_sizes"] = sizes
        node["overlay"]["rollout_rebalance"]["enabled"] = moves
        step = step_job(config, read_job(config, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, 1576.6)
        return step_seconds(step, PUBLISHED_CLUSTER)["rollout"]

    sizes = [8, 16, 32, 64]
    found = [rollout([64], False), rollout(sizes, False), rollout(sizes, True)]
    assert found == sorted(found, reverse=True) and len(set(found)) == 3
    for document in ("rollout.md", "rollout.zh.md"):
        before, _, behind = (ROOT / "docs" / document).read_text().partition("1,576.6")
        shown = re.findall(r"(\d+) s", before[-300:] + behind[:200])
        assert set(shown) >= {f"{seconds:.0f}" for seconds in found}


def test_text_and_json_say_what_is_not_known(true_weights):
    step = step_job(true_weights, read_job(true_weights, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, 1500)
    printed = describe_time(step, PUBLISHED_CLUSTER)
    assert "answers: log-normal with spread 0.6, mean 1500" in printed and "set --response-spread to yours" in printed
    assert text.unknowns(replace(step, spread=1.0, rebalanced=False), PUBLISHED_CLUSTER) == []
    numbers = text.time_estimates(step, PUBLISHED_CLUSTER)
    assert numbers["unknown"] == text.unknowns(step, PUBLISHED_CLUSTER)
    assert sum(numbers["answers"]["graphs"].values()) == pytest.approx(1)
    other = published_job("qwen", {"model": "Qwen3-235B-A22B"})
    smaller = replace(other, model={**other.model, "num_hidden_layers": 48})
    assert any("operators are taken from Qwen3-235B" in line for line in text.unknowns(smaller, Cluster(1024)))
    assert any("beyond 768 dies" in line for line in text.unknowns(smaller, Cluster(1024)))
    waiting = replace(step, engine_sequences=8)
    assert any("wait for a place" in line for line in text.unknowns(waiting, PUBLISHED_CLUSTER))


@pytest.mark.parametrize("spread", ["-1", "nan", "4"])
def test_invalid_response_spread_rejected(spread, capsys):
    script = load_script(ROOT / "scripts" / "plan.py")
    assert script.main([*LINE, "--time", f"--response-spread={spread}"]) == 2
    assert re.match(r"error: --response-spread=\S+ is invalid: it must lie between 0 and 3", capsys.readouterr().err)


def test_the_picture_shows_the_largest_part_and_is_the_same_every_time(tmp_path):
    def job_on(cluster):
        return replace(published_job("true"), dp=max(1, cluster.dies // 32))

    pictures = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for picture in pictures:
        draw_time(job_on, PUBLISHED_CLUSTER, picture)
    drawn = pictures[0].read_text()
    assert drawn == pictures[1].read_text()
    (largest, _), *_ = largest_parts(job_on(PUBLISHED_CLUSTER), PUBLISHED_CLUSTER)
    assert largest in drawn and "not measured" in drawn
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert [text for text in texts if text in SIZES] == list(SIZES), "a quarter of the dies to four times as many"
    names = [name for name, _ in largest_parts(job_on(PUBLISHED_CLUSTER), PUBLISHED_CLUSTER)]
    assert [text for text in texts if text in names] == names[:8] and len(names) > 8


def test_parts_of_less_than_ten_milliseconds_are_left_out(monkeypatch):
    parts = {"rollout": {"decode": 0.5, "reshard": 0.01, "start": 0.0099}, "update": {"optimizer": 2.0, "norm": 0.0}}
    monkeypatch.setattr(text, "step_parts", lambda job, cluster: parts)
    found = largest_parts(published_job("true"), PUBLISHED_CLUSTER)
    assert found == [("update: optimizer", 2.0), ("rollout: decode", 0.5), ("rollout: reshard", 0.01)]


def test_the_command_prints_numbers_that_add_up(capsys, tmp_path):
    line = [*LINE, "--time", "--cluster", str(cluster_file(tmp_path, 2, 16)), "--json"]
    assert load_script(ROOT / "scripts" / "plan.py").main(line) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["modelled"] and numbers["dies"] == 32 and set(numbers["stages_s"]) == set(STAGES)
    assert numbers["step_s"] == pytest.approx(sum(numbers["stages_s"].values()))
    for stage, parts in numbers["parts_s"].items():
        assert numbers["stages_s"][stage] == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize(
    ("nodes", "sentence"),
    [
        (257, "describes 4112 dies, but the model of a step covers at most 4096"),
        ("<nodes>", "NODES='<nodes>' in .* is invalid. Set it to a number from 1 to 4096"),
        (0, "NODES='0' in .* is invalid. Set it to a number from 1 to 4096"),
    ],
)
def test_a_bad_cluster_is_one_sentence(tmp_path, nodes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_cluster(cluster_file(tmp_path, nodes, 16))
    with pytest.raises(ValueError, match="is invalid: not a file. Set it to one like"):
        read_cluster(tmp_path / "none.env")


@pytest.mark.parametrize("response", [5000, float("nan"), 0])
def test_lengths_beyond_the_configuration_rejected(response, true_weights):
    with pytest.raises(ValueError, match="must lie within"):
        step_job(true_weights, read_job(true_weights, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, response)


def test_the_time_of_a_critic_is_not_made_up():
    folder = ("actor_rollout_ref.model.path=/m", "algorithm.adv_estimator=gae")
    config = resolved(compose("deepseek_v3_256die_true_weight", [*folder]))
    with pytest.raises(ValueError, match="the time of its critic is not modelled"):
        step_job(config, read_job(config, DEEPSEEK), DEEPSEEK, PUBLISHED_CLUSTER, 78, 1500)


def test_the_command_says_what_is_wrong_in_one_sentence(capsys, tmp_path):
    script = load_script(ROOT / "scripts" / "plan.py")
    assert script.main([*LINE, "--picture", "step.svg"]) == 2
    assert re.fullmatch("error: --picture draws the time of a step. Add --time\n", capsys.readouterr().err)
    folder = tmp_path / "none"
    assert script.main([*LINE, "--time", "--picture", str(folder / "step.svg")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
