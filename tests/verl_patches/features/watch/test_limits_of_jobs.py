"""The shipped limits compared with the step model: phases may last hours, but their units stay far below a limit."""

import json

import pytest

from post_training.hang_detection.settings import PHASES
from post_training.plan.job import read_job
from post_training.plan.step_time.configured import step_job
from post_training.plan.step_time.job import Cluster
from post_training.plan.step_time.model import step_seconds
from scripts import supervise
from tests.post_training.plan.test_plan import MODEL
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

DEEPSEEK = json.loads(MODEL.read_text())
# From config.json of Qwen2.5-32B.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
    "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152064,
    "max_position_embeddings": 32768, "tie_word_embeddings": False,
}  # fmt: skip
JOBS = {
    "deepseek_v3_256die_random_init": DEEPSEEK,
    "deepseek_v3_256die_true_weight": DEEPSEEK,
    "deepseek_v3_256die_dapo": DEEPSEEK,
    "qwen2_5_32b_dapo": QWEN,
}
MARGIN = 20
"""The model gives a mean unit; a unit of the longest answers on the slowest die takes several times as long."""


def modelled(name):
    """Return a job's limits, the seconds of its stages with the longest answers, and the units of its stages."""
    config = resolved(compose(name, []))
    job, data = read_job(config, JOBS[name]), config["data"]
    cluster = Cluster(config["trainer"]["nnodes"] * config["trainer"]["n_gpus_per_node"])
    longest = data["max_response_length"]
    step = step_job(config, job, JOBS[name], cluster, data["max_prompt_length"], longest)
    units = {
        "rollout": longest,
        "ref": step.sequences / (step.dp * step.micro_reference),
        "update": step.sequences / (step.dp * step.micro),
        "reward": step.sequences,
    }
    return OverlaySettings.from_config(config["actor_rollout_ref"]).watch, step_seconds(step, cluster), units


@pytest.mark.parametrize("name", JOBS)
def test_a_unit_of_every_phase_is_far_below_its_limit(name):
    watch, seconds, units = modelled(name)
    for phase, count in units.items():
        assert MARGIN * seconds[phase] / count < getattr(watch.warn_s, phase), phase


def test_a_healthy_phase_outlasts_the_limits_of_silence():
    """This is why limits must not apply to the length of a phase."""
    watch, seconds, _ = modelled("qwen2_5_32b_dapo")
    assert seconds["update"] > watch.end_s.update and seconds["rollout"] > watch.end_s.rollout


@pytest.mark.parametrize("name", [*JOBS, "rehearsal", "qwen2_5_0_5b_gsm8k", "qwen2_5_vl_7b_geo3k"])
def test_the_job_ends_a_hang_before_its_supervisor(name):
    """The job names the hung rank; the supervisor's `--silent-after` cannot."""
    watch = OverlaySettings.from_config(compose(name, []).actor_rollout_ref).watch
    silent_after = supervise._options(["--", "true"]).silent_after
    assert max(getattr(watch.end_s, phase) for phase in ("silent", *PHASES)) < silent_after - 600
