"""`--check` of jobs that offload their state in order."""

import pytest

from tests.stack_2026.verl.test_jobs import DIES_256, MODELS, ONE_CARD
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.offload import LIBRARY

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON, FSDP = f"{ACTOR}.megatron", f"{ACTOR}.fsdp_config"
LIBRARIES = "actor_rollout_ref.model.external_lib"
OWN = "verl_plugin.resume.engines,verl_plugin.alltoallv.engines"
WITHOUT = f"{LIBRARIES}=[{OWN},verl_plugin.phase_peaks]"


@pytest.mark.parametrize(
    ("job", "override", "says"),
    [
        (DIES_256, f"{MEGATRON}.param_offload=false", "the KV cache is loaded while parameters are on the dies"),
        (DIES_256, f"{MEGATRON}.optimizer_offload=false", "while the optimizer's state is on the dies"),
        (DIES_256, f"{MEGATRON}.use_distributed_optimizer=false", "float32 weights on the dies"),
        (DIES_256, "actor_rollout_ref.ref.megatron.param_offload=false", "the reference is on the dies in every phase"),
        (ONE_CARD, f"{FSDP}.param_offload=false", f"Set it to true, or remove {LIBRARY}"),
        (ONE_CARD, f"{FSDP}.optimizer_offload=false", f"{FSDP}.optimizer_offload=False is invalid"),
        (ONE_CARD, f"{ROLLOUT}.free_cache_engine=false", "the KV cache stays on the dies"),
        (ONE_CARD, f"+{ROLLOUT}.enable_sleep_mode=false", "the rollout's weights and KV cache stay"),
        (ONE_CARD, f"{LIBRARIES}=[{LIBRARY},{OWN}]", f"{LIBRARY} is listed after verl_plugin.alltoallv.engines"),
        (ONE_CARD, f"{LIBRARIES}=[{OWN},{LIBRARY},verl_plugin.phase_peaks]", "is listed after verl_plugin.phase_peaks"),
    ],
)
def test_job_whose_state_would_stay_rejected(job, override, says):
    with pytest.raises(JobError) as raised:
        check_job(compose_job(job, override.split()), MODELS[job])
    assert says in str(raised.value)


def test_job_with_a_critic_rejected():
    from verl_plugin.offload.checks import offload_problems

    config = {"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"model": {"external_lib": LIBRARY}}}
    config["actor_rollout_ref"]["actor"] = {"strategy": "fsdp2"}
    assert "does not move the state of a critic" in next(offload_problems(config))


@pytest.mark.parametrize("override", [f"{FSDP}.param_offload=false", f"{ROLLOUT}.free_cache_engine=false"])
def test_job_without_the_module_is_upstreams(override):
    check_job(compose_job(ONE_CARD, [WITHOUT, override]), MODELS[ONE_CARD])


def test_layers_on_the_host_need_no_keys():
    """With `offload_policy` verl moves each layer by itself."""
    changes = [f"{FSDP}.offload_policy=true", f"{FSDP}.param_offload=false", f"{FSDP}.optimizer_offload=false"]
    check_job(compose_job(ONE_CARD, changes), MODELS[ONE_CARD])
