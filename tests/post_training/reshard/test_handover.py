"""Handing weights over to another process on the same die, on one rank: what arrives, and what counts as incomplete.

Tests with several ranks and with vLLM workers are in tests/stack_2026/verl_plugin.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch_npu  # noqa: F401

from post_training.layouts.grouped_query import table
from post_training.layouts.layout import RolloutPlacement, TrainPlacement
from post_training.layouts.regions import SideRegions, regions_of
from post_training.reshard.handover import Exporter, HandoverError, Importer, Manifest, without_memory
from tests.post_training.layouts.grouped_query_reference import (
    WITH_EXPERTS,
    full_weights,
    megatron_state,
    rollout_state,
)
from tests.post_training.layouts.reference import same_bits

TRAIN, ROLLOUT = TrainPlacement(1, 1, 1, 1, (WITH_EXPERTS.layers,)), RolloutPlacement(1)
BUCKET = 20_000


class Die:
    """One die, with a training rank and the weights of the rollout process."""

    def __init__(self, group) -> None:
        full = full_weights(WITH_EXPERTS)
        self.train = {name: value.npu() for name, value in megatron_state(full, WITH_EXPERTS, TRAIN, 0).items()}
        self.expected = rollout_state(full, WITH_EXPERTS, ROLLOUT, 0)
        kinds = {name: torch.bfloat16 for name in self.expected}
        self.served = {
            name: torch.full(value.shape, torch.nan, dtype=kinds[name], device="npu")
            for name, value in self.expected.items()
        }
        shapes = {name: (tuple(value.shape), value.dtype) for name, value in self.served.items()}
        layouts = table(WITH_EXPERTS)
        names = tuple(layouts.shapes)
        train, rollout = (
            SideRegions(names, [regions_of(shards, names)], shards)
            for shards in (layouts.megatron(TRAIN, 0), layouts.vllm_ascend(ROLLOUT, 0))
        )
        self.exporter = Exporter(
            train,
            lambda: self.train,
            rollout,
            without_memory(shapes),
            group,
            torch.device("npu"),
            BUCKET,
            verify=True,
        )
        self.manifest = self.exporter.prepare()

    def take(self, stream: Iterator[tuple[str, torch.Tensor]], version: int, manifest: Manifest | None = None) -> None:
        importer = Importer(manifest or self.manifest, self.served, version)
        for name, content in stream:
            importer.take(name, content)
        importer.finish()


@pytest.fixture
def die(lone_rank) -> Die:
    return Die(lone_rank)


def test_weights_arrive_in_the_type_of_the_rollout(die):
    die.take(die.exporter.export(1), 1)
    # The reference values survive a round trip through bfloat16.
    assert all(same_bits(die.served[name].cpu().float(), value) for name, value in die.expected.items())
    assert die.exporter.report.bytes_received == 0
    assert die.exporter.report.bytes_copied == sum(value.nbytes for value in die.served.values()) - padding(die)
    assert len(die.manifest.buckets) > 2 and die.exporter.report.staging_bytes <= BUCKET


def padding(die: Die) -> int:
    """Return the bytes of padding rows in the vocabulary of the embedding and output layer."""
    return 2 * (128 - WITH_EXPERTS.vocab) * WITH_EXPERTS.hidden * 2


def test_padding_of_the_rollout_is_zero(die):
    die.take(die.exporter.export(1), 1)
    assert not die.served["lm_head.weight"][WITH_EXPERTS.vocab :].any()


def test_missing_bucket_detected(die):
    die.take(die.exporter.export(1), 1)
    for dropped in (*die.manifest.names, "whole/2"):
        stream = ((name, content) for name, content in die.exporter.export(2) if name != dropped)
        with pytest.raises(HandoverError, match=dropped):
            die.take(stream, 2)


def test_buckets_of_another_update_are_rejected(die):
    with pytest.raises(HandoverError, match="bucket whole/1 came in update 2, but whole/2 was expected"):
        die.take(die.exporter.export(1), 2)


def test_bucket_of_another_size_is_rejected(die):
    stream = ((name, content[:-16]) for name, content in die.exporter.export(1))
    with pytest.raises(HandoverError, match="bucket local/0 has "):
        die.take(stream, 1)


def test_wrong_offset_is_found_by_verification(die):
    name = die.manifest.names[1]
    direction = die.manifest.buckets[name]
    first, *others = direction.chunks
    moved = dataclasses.replace(first, start=first.start + 16, stop=first.stop + 16)
    buckets = {**die.manifest.buckets, name: dataclasses.replace(direction, chunks=(moved, *others))}
    with pytest.raises(HandoverError, match="weights differ from training's after update 1: "):
        die.take(die.exporter.export(1), 1, dataclasses.replace(die.manifest, buckets=buckets))


def test_padding_that_a_rollout_has_written_is_found(die):
    importer = Importer(die.manifest, die.served, 1)
    for name, content in die.exporter.export(1):
        importer.take(name, content)
    die.served["lm_head.weight"][-1] = 1.0
    with pytest.raises(HandoverError, match="1 weights differ .*: lm_head.weight"):
        importer.finish()


def test_weights_in_new_tensors_are_exported(die):
    die.take(die.exporter.export(1), 1)
    die.train = {name: value * 2 for name, value in die.train.items()}
    die.take(die.exporter.export(2), 2)
    assert all(same_bits(die.served[name].cpu().float(), value * 2) for name, value in die.expected.items())
