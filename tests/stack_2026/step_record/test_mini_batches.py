"""Other ranks than those of the recorded step would divide its samples into other mini batches."""

from __future__ import annotations

from typing import Any

import pytest

from verl_plugin.step_record.folder import RecordedStep, RecordError
from verl_plugin.step_record.worker import Replay


def config(strategy: str, **sizes: int) -> dict[str, Any]:
    names = ("tensor_model", "pipeline_model", "context")
    megatron = {f"{name}_parallel_size": sizes.get(name, 1) for name in names}
    fsdp = {"ulysses_sequence_parallel_size": sizes.get("ulysses", 1)}
    actor = {"strategy": strategy, "megatron": megatron, "fsdp_config": fsdp}
    return {"actor_rollout_ref": {"actor": actor, "rollout": {"checkpoint_engine": {}}}}


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("recorded", "dies", "given", "mini", "passes"),
    [
        (config("fsdp2"), 1, [], 8, False),
        (config("fsdp2"), 1, [], 16, True),  # one update
        (config("fsdp2"), 2, [], 8, True),
        (config("fsdp2"), 1, [f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], 8, True),
        (config("megatron", tensor_model=2), 4, [], 8, False),
        (config("megatron", tensor_model=2, context=2), 4, [f"{ACTOR}.megatron.context_parallel_size=1"], 8, True),
    ],
)
def test_step_of_several_updates_needs_as_many_data_parallel_ranks(monkeypatch, recorded, dies, given, mini, passes):
    monkeypatch.setenv("WORLD_SIZE", "2")
    step = RecordedStep(1, [str(number) for number in range(16)], {}, {"mini_batch_size": mini}, {}, recorded, dies)
    replay = Replay(step, None, given, 1e-4)
    if passes:
        replay._require_mini_batches()
    else:
        with pytest.raises(RecordError, match=r"2 updates, among which \d data-parallel ranks divide its samples"):
            replay._require_mini_batches()
