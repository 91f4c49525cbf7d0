"""verl's own dispatch to workers: less is serialized, and every worker still gets the same data."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from verl import DataProto
from verl.single_controller.base.decorator import dispatch_dp_compute_data_proto, dispatch_megatron_compute_data_proto
from verl.single_controller.base.megatron.worker_group import MegatronWorkerGroup
from verl.single_controller.ray.base import RayWorkerGroup

from verl_patches.features.measure import serialized
from verl_patches.features.shared_chunks.store import stored_once
from verl_patches.protocol import getstate
from verl_patches.single_controller.ray.base import execute_all_async

SAMPLES, TOKENS = 16, 32


class Ranks(RayWorkerGroup, MegatronWorkerGroup):
    """verl's worker group without Ray: like Ray, workers serialize arguments that are not in the object store."""

    def __init__(self, tp: int, pp: int, dp: int):
        self.stored, self.got = [], {}
        self._ranks, self._tp = tp * pp * dp, tp
        self._dp = dp
        self._workers = [SimpleNamespace(work=SimpleNamespace(remote=self._takes(rank))) for rank in range(self._ranks)]
        self.fused_worker_used = False

    @property
    def world_size(self):
        return self._ranks

    @property
    def dp_size(self):
        return self._dp

    def get_megatron_rank_info(self, rank):
        # Ranks are in the order tensor, data, pipeline.
        return SimpleNamespace(dp_rank=rank // self._tp % self._dp)

    def put(self, chunk):
        self.stored.append(pickle.dumps(chunk))
        return ("reference", len(self.stored) - 1)

    def _takes(self, rank):
        def remote(*arguments):
            (argument,) = arguments
            known = isinstance(argument, tuple)
            self.got[rank] = pickle.loads(self.stored[argument[1]] if known else pickle.dumps(argument))

        return remote


def batch():
    return DataProto.from_dict(
        {"tokens": torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS)},
        non_tensors={"uid": [str(sample) for sample in range(SAMPLES)]},
    )


def call(ranks, once, dispatch=dispatch_megatron_compute_data_proto):
    """Call through verl's dispatch. Return the tokens by rank, and the bytes that the driver serialized."""
    upstream = RayWorkerGroup.execute_all_async
    state = DataProto.__getstate__
    # The installed verl calls `put` in its dispatch, which the cluster's commit does not.
    with mock.patch.object(ray, "put", lambda chunk: chunk):
        arguments, named = dispatch(ranks, batch())
    with (
        mock.patch.object(DataProto, "__getstate__", lambda self: getstate(state, self)),
        mock.patch.object(ray, "put", ranks.put),
    ):
        serialized.take()
        if once:
            execute_all_async(upstream, ranks, "work", *arguments, **named)
        else:
            upstream(ranks, "work", *arguments, **named)
        size = serialized.take()
    return {rank: got.batch["tokens"].tolist() for rank, got in ranks.got.items()}, size


@pytest.mark.parametrize(("tp", "pp", "dp"), [(4, 1, 1), (2, 2, 2), (2, 1, 4), (4, 8, 8)])
def test_a_chunk_is_serialized_once_and_every_rank_gets_its_own(tp, pp, dp):
    ranks = Ranks(tp, pp, dp)
    once, size = call(ranks, once=True)
    usual, before = call(Ranks(tp, pp, dp), once=False)
    assert once == usual and len(once) == tp * pp * dp
    assert len(ranks.stored) == dp
    # The control: upstream serializes for every rank.
    assert before == tp * pp * size > 0


def test_what_one_worker_takes_alone_is_handed_over_as_before():
    ranks = Ranks(1, 1, 4)
    once, size = call(ranks, once=True, dispatch=dispatch_dp_compute_data_proto)
    usual, before = call(Ranks(1, 1, 4), once=False, dispatch=dispatch_dp_compute_data_proto)
    assert once == usual and size == before > 0 and not ranks.stored


def test_what_a_later_verl_has_put_already_goes_through():
    ranks = Ranks(2, 2, 2)
    with mock.patch.object(ray, "put", ranks.put):
        arguments, named = dispatch_megatron_compute_data_proto(ranks, batch())
        execute_all_async(RayWorkerGroup.execute_all_async, ranks, "work", *arguments, **named)
    assert len(ranks.stored) == 2 and len(ranks.got) == 8


def test_arguments_that_are_not_dealt_out_stay_themselves():
    chunk = batch()
    positional, named = stored_once([[chunk, chunk], 5], {"name": "x"}, 2, lambda _: True, lambda _: "stored")
    assert positional == [[chunk, chunk], 5] and named == {"name": "x"}
    positional, named = stored_once([["a", "a"]], {"more": [chunk, chunk]}, 2, lambda each: each is chunk, lambda _: 0)
    assert positional == [["a", "a"]] and named == {"more": [0, 0]}


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=3))
def test_the_store_holds_what_the_lists_held(lists):
    chunks = [object() for _ in range(4)]
    store = []

    def put(chunk):
        store.append(chunk)
        return len(store) - 1

    dealt, _ = stored_once([[chunks[index] for index in each] for each in lists], {}, 5, lambda _: True, put)
    for each, found in zip(lists, dealt, strict=True):
        assert [store[place] if isinstance(place, int) else place for place in found] == [chunks[i] for i in each]
    assert len(store) == len(set(map(id, store)))
    counted = [index for each in lists for index in each]
    assert len(store) == sum(counted.count(index) > 1 for index in range(4))
