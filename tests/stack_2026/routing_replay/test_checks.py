"""Settings of routing replay that cannot work are rejected by name; verl's keys with this project's engines pass."""

import pytest

from tests.stack_2026.verl.test_jobs import ACTOR, MODELS, ONE_CARD, ONE_NODE, ROLLOUT, ULYSSES
from verl_plugin.alltoallv.settings import LIBRARY
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.routing_replay.checks import ENGINES

REF = "actor_rollout_ref.ref"
SENDS = f"{ROLLOUT}.enable_rollout_routing_replay=true"
LOADS = f"actor_rollout_ref.model.external_lib=[{LIBRARY},{ENGINES}]"
MEGATRON = [f"{part}.megatron.router_replay.mode=R3" for part in (ACTOR, REF)]
FSDP2 = [f"+{part}.fsdp_config.router_replay.mode=R3" for part in (ACTOR, REF)]
REPLAY = [SENDS, LOADS, *MEGATRON]
TWO_DIES = "trainer.n_gpus_per_node=2"


def test_keys_of_verl_with_the_engines_pass():
    config = check_job(compose_job(ONE_NODE, REPLAY), MODELS[ONE_NODE])
    assert config["actor_rollout_ref"]["actor"]["megatron"]["router_replay"]["mode"] == "R3"
    check_job(compose_job(ONE_NODE, [SENDS, LOADS]), MODELS[ONE_NODE])  # compares instead of replaying
    config = check_job(compose_job(ONE_CARD, [SENDS, LOADS, *FSDP2]), MODELS[ONE_NODE])
    assert config["actor_rollout_ref"]["actor"]["fsdp_config"]["router_replay"] == {"mode": "R3"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([LOADS, *MEGATRON], f"{ROLLOUT}.enable_rollout_routing_replay=False is invalid"),
        ([SENDS, LOADS, f"{ACTOR}.megatron.router_replay.mode=R2"], "R2 records experts in training. Set it to false"),
        ([SENDS, *MEGATRON], "nothing replays in padded batches, in the reference or on FSDP2"),
        ([SENDS, LOADS, MEGATRON[0]], f"{REF}.megatron.router_replay.mode=disabled is invalid: the actor has R3"),
        ([*REPLAY, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size=2"], "interleaved stages. Set it to null"),
        ([*REPLAY, f"{REF}.megatron.dynamic_context_parallel=true"], "experts are not placed in parts of sequences"),
        ([*REPLAY, f"{ROLLOUT}.quantization=fp8"], f"{ROLLOUT}.quantization=fp8 is invalid"),
        ([*REPLAY, f"+{ROLLOUT}.engine_kwargs.vllm.quantization=ascend"], "vllm.quantization=ascend is invalid"),
        ([*REPLAY, f"+{ROLLOUT}.engine_kwargs.vllm.decode_context_parallel_size=2"], "vLLM returns no experts with it"),
        ([*REPLAY, f"{ROLLOUT}.name=sglang"], "experts come from vLLM-Ascend. Set it to vllm"),
    ],
)
def test_setting_that_cannot_replay_rejected(overrides, says):
    with pytest.raises(JobError) as caught:
        check_job(compose_job(ONE_NODE, overrides), MODELS[ONE_NODE])
    assert says in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("model", "overrides", "says"),
    [
        (MODELS[ONE_CARD], FSDP2, "qwen3 has no experts. Set it to false"),
        (MODELS[ONE_NODE], [FSDP2[0].replace("R3", "R4")], "mode=R4 is invalid: no such mode"),
        (MODELS[ONE_NODE], [FSDP2[0].replace("R3", "R2")], "verl records experts only on Megatron"),
        (MODELS[ONE_NODE], [*FSDP2, TWO_DIES, f"{ACTOR}.fsdp_config.{ULYSSES}=2"], "parts of sequences"),
        (MODELS[ONE_NODE], [*FSDP2, TWO_DIES, f"{ACTOR}.{ULYSSES}=2"], "parts of sequences"),
    ],
)
def test_fsdp2_that_cannot_replay_rejected(model, overrides, says):
    with pytest.raises(JobError, match=says):
        check_job(compose_job(ONE_CARD, [SENDS, LOADS, *overrides]), model)
