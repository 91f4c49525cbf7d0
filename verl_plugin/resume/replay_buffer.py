"""verl's buffer of answers, which returns a batch in the order of its prompts; set by `trainer.v1.sampler`.

verl's own buffer returns them in the order of a set of random names. The answers that share a micro batch, and the
order in which numbers are summed, would then differ from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

ORDER = "prompt_order"
"""A prompt's tag: its place in the batch that the data loader gave."""


class OrderedReplayBuffer(ReplayBuffer):
    """verl's buffer for its trainer `sync`.

    Args:
        sampler_kwargs: `trainer.v1.sampler.sampler_kwargs`. `poll_interval` is the time in seconds between two checks
            whether all answers are there.
        named: verl's.
    """

    def __init__(self, *, sampler_kwargs: Mapping[str, Any] | None, **named: Any) -> None:
        own = dict(sampler_kwargs or {})
        super().__init__(sampler_kwargs=own, **named, **{key: own[key] for key in ("poll_interval",) if key in own})

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict], dict[str, int]]:
        """As upstream, but with the prompts of one step in their order."""
        selected, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, len(sampleable_keys))
        tags = tq.kv_list(partition_id)[partition_id]
        selected.sort(key=lambda uid: (steps.get(uid, 0), tags[uid][ORDER]))
        return selected[:batch_size], partition, steps

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        """As upstream, but with the answers ordered by prompt, then by their own numbers."""
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        places = {uid: place for place, uid in enumerate(selected_prompt_uids)}

        def place_of(index: int) -> tuple[int, ...]:
            uid, *numbers = batch.keys[index].split("_")
            return (places[uid], *map(int, numbers))

        batch.reorder(sorted(range(len(batch.keys)), key=place_of))
        return batch
