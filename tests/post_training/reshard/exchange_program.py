"""Reshard on four ranks over many pairs of layouts, and compare every rollout tensor with the naive reference.

The ranks write their results, which `test_exchange` checks. As in all tests, collectives complete only at wait().
"""

import json
import os
import random
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import meters
from post_training.layouts.layout import EXPERT_MARK, RolloutPlacement, TrainPlacement
from post_training.models.deepseek_v3 import CASTABLE, megatron, vllm_ascend
from post_training.reshard import exchange
from post_training.reshard.overlaps import LayoutError
from post_training.reshard.resharder import Resharder
from post_training.reshard.schedule import Direction
from tests.post_training.layouts.reference import SMALL, State, full_weights, megatron_state, rollout_state, same_bits

WORLD = 4


def placements(seed: int) -> tuple[TrainPlacement, RolloutPlacement]:
    """Draw a pair of layouts of four ranks."""
    draw = random.Random(seed)
    tp, pp = draw.choice([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)])
    dp = WORLD // tp // pp
    virtual = draw.choice([1, 1, 2])
    cuts = sorted(draw.choices(range(SMALL.layers + 1), k=pp * virtual - 1))
    edges = [0, *cuts, SMALL.layers]
    train = TrainPlacement(
        tp=tp,
        pp=pp,
        ep=draw.choice([size for size in (1, 2, 4) if dp % size == 0]),
        dp=dp,
        num_layer_list=tuple(stop - start for start, stop in zip(edges, edges[1:], strict=False)),
        moe_tp_extend_ep=draw.random() < 0.6,
        virtual_stages=virtual,
        vocab_padded=draw.choice([None, 112]),
    )
    instances = draw.choice([1, 1, 2, 4])
    size = WORLD // instances
    rollout_tp = draw.choice([tp for tp in (1, 2, 4) if size % tp == 0])
    rollout = RolloutPlacement(
        tp=rollout_tp,
        dp=size // rollout_tp,
        ep=draw.choice([1, size]),
        instances=instances,
        shared_expert_replicated=draw.random() < 0.5,
        vocab_multiple=draw.choice([4, 64]),
    )
    return train, rollout


BIAS = ".mlp.gate.e_score_correction_bias"
"""No shipped sharding spec declares a cast of this bias; the tests do, to exercise casts."""


class Case:
    """One pair of layouts on this rank, with live tensors on the device."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        bucket_bytes: int,
        overlap: bool = False,
        fp32_bias: bool = False,
        ranks_per_node: int | None = None,
        castable: tuple[str, ...] = (*CASTABLE, BIAS),
    ) -> None:
        self.rank = dist.get_rank()
        self.train, self.rollout = placements(seed)
        self.full = full_weights(SMALL, dtype, seed)
        source = megatron_state(self.full, SMALL, self.train, self.rank)
        self.expected = rollout_state(self.full, SMALL, self.rollout, self.rank)
        if fp32_bias:
            source = {name: value.float() if "expert_bias" in name else value for name, value in source.items()}
        self.source = {name: value.npu() for name, value in source.items()}
        self.target = {name: torch.full_like(value, torch.nan).npu() for name, value in self.expected.items()}
        self.resharder = Resharder(
            self.source,
            self.target,
            [megatron(SMALL, self.train, rank) for rank in range(WORLD)],
            [vllm_ascend(SMALL, self.rollout, rank) for rank in range(WORLD)],
            dist.group.WORLD,
            bucket_bytes,
            castable,
            overlap,
            ranks_per_node,
        )

    def differing(self) -> list[str]:
        """Return the names of rollout tensors that differ from the naive reference in any bit."""
        return [name for name, value in self.expected.items() if not same_bits(self.target[name].cpu(), value)]

    def addresses(self) -> dict[str, int]:
        return {name: value.data_ptr() for name, value in self.target.items()}


def many_layouts(count: int) -> list[dict]:
    """Reshard twice for random layouts, dtypes and bucket sizes; return differing tensors and the cost of each."""
    found = []
    for seed in range(count):
        draw = random.Random(seed)
        dtype = draw.choice([torch.bfloat16, torch.float32])
        bucket, nodes = draw.choice([1500, 5000, 1 << 20]), draw.choice([None, 2])
        case = Case(seed, dtype, bucket, draw.random() < 0.5, fp32_bias := draw.random() < 0.5, nodes)
        first = case.resharder.run()
        differing, addresses = case.differing(), case.addresses()
        for value in case.source.values():
            value.mul_(2)
        case.full = {name: value * 2 for name, value in case.full.items()}
        case.expected = rollout_state(case.full, SMALL, case.rollout, case.rank)
        again = case.resharder.run()
        found.append(
            {
                "layouts": f"{case.train} {case.rollout}",
                "tensors": len(case.expected),
                "differing": differing + case.differing(),
                "moved": addresses != case.addresses(),
                "buckets": [first.buckets, again.buckets],
                "collectives again": again.collectives,
                "casts": fp32_bias and dtype == torch.bfloat16,
                "changed by casts": first.values_changed_by_casts + again.values_changed_by_casts,
                "planning again": [again.object_collectives, again.plan_seconds],
            }
        )
    return found


class NeverWaitedFor:
    """A collective whose wait() returns at once."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        """Return at once."""


def without_waiting(seed: int) -> list[str]:
    """Return the tensors that differ if the exchange continues before its collectives have completed."""
    case = Case(seed, torch.bfloat16, 5000)
    all_to_all, works = dist.all_to_all_single, []

    def launch(*arguments: object, **options: object) -> NeverWaitedFor | dist.Work:
        work = all_to_all(*arguments, **options)
        if not options.get("async_op"):
            return work
        works.append(work)
        return NeverWaitedFor(work)

    with mock.patch.object(dist, "all_to_all_single", launch):
        case.resharder.run()
    differing = case.differing()
    for work in works:
        work.wait()
    return differing


def staging_by_bucket() -> list[dict]:
    """Return buckets and staging bytes for small to large bucket limits, without and with overlap."""
    found = []
    for overlap in (False, True):
        for bucket in (1500, 6000, 100_000):
            report = (case := Case(7, torch.float32, bucket, overlap)).resharder.run()
            found.append(
                {
                    "overlap": overlap,
                    "bucket": bucket,
                    "differing": case.differing(),
                    "buckets": report.buckets,
                    "staging": report.staging_bytes,
                }
            )
    return found


def bytes_received(seed: int) -> dict[str, int]:
    """Return the bytes that a rank sent, received, and needs without having them; experts also separately."""
    case = Case(seed, torch.bfloat16, 1 << 20)
    report = case.resharder.run()
    need, have = coverage(case, vllm_ascend(SMALL, case.rollout, case.rank), case.expected)
    missing = {name: int((need[name] & ~have[name]).sum()) * 2 for name in need}
    return {
        "received": report.bytes_received,
        "sent": report.bytes_sent,
        "missing": sum(missing.values()),
        "experts received": report.expert_bytes_received,
        "experts missing": sum(size for name, size in missing.items() if EXPERT_MARK in name),
    }


def coverage(case: Case, shards: list, state: State) -> tuple[State, State]:
    """Return masks of the elements of every HF tensor: those that rollout needs, and those that training has."""
    need, have = ({name: torch.zeros(v.shape, dtype=torch.bool) for name, v in case.full.items()} for _ in range(2))
    for marks, held in ((need, shards), (have, megatron(SMALL, case.train, case.rank))):
        for shard in held:
            if shard.hf_name:
                marks[shard.hf_name][tuple(slice(*interval) for interval in shard.bounds)] = True
    return need, have


def verified() -> dict[str, list[str]]:
    """Return the names from verify() after a reshard, after a bit flip on the last rank, and after one more run."""
    case = Case(11, torch.bfloat16, 4000)
    case.resharder.run()
    found = {"at first": case.resharder.verify()}
    if case.rank == WORLD - 1:
        shard = next(p for p in case.resharder._rollout_layouts[case.rank] if p.hf_name.endswith("up_proj.weight"))
        held = shard.locate(case.target)
        held[-1, -1] = (held[-1:, -1:].contiguous().view(torch.uint8) ^ 1).view(torch.bfloat16)[0, 0]
    found["flipped"] = case.resharder.verify()
    case.resharder.run()
    return found | {"again": case.resharder.verify()}


def rounded_bias() -> dict:
    """Reshard biases like DeepSeek-V3's published ones, float32 and near 5, to a rollout in bfloat16."""
    case = Case(11, torch.bfloat16, 4000, fp32_bias=True)
    drawn = torch.Generator().manual_seed(0)
    biases = {name: 5 + torch.rand(value.shape, generator=drawn) for name, value in case.full.items() if BIAS in name}
    for name, value in megatron_state(case.full | biases, SMALL, case.train, case.rank).items():
        if "expert_bias" in name:
            case.source[name].copy_(value)
    report = case.resharder.run()
    lost = sum(int((bias.bfloat16().float() != bias).sum()) for bias in biases.values())
    return {"changed": report.values_changed_by_casts, "lost": lost, "differing": case.resharder.verify()}


def steady_state() -> dict:
    """Return the device's counters for the second run, and the run's own report."""
    case = Case(5, torch.bfloat16, 20_000)
    case.resharder.run()
    with meters.phase("steady"):
        report = case.resharder.run()
    counted = meters.snapshot()["phases"]["steady"]
    return {
        "buckets": report.buckets,
        "collectives": report.collectives,
        "counted": {kind: by_size[str(WORLD)] for kind, by_size in counted["collectives"].items()},
        "moved": report.bytes_sent + report.bytes_received + report.bytes_copied,
        "copied on the device": counted["copies"]["device_to_device"]["bytes"],
        "host": sum(counted["copies"][way]["bytes"] for way in ("host_to_device", "device_to_host")),
    }


def transposed_bytes() -> dict:
    """Count the bytes transposed on the device, also with a packing that transposes whole experts.

    Returns:
        Transposed bytes by packing, differing tensors, and the bytes of experts that were sent or copied.
    """
    case = Case(5, torch.bfloat16, 20_000)
    case.resharder.run()
    found: dict = {"differing": []}
    for name, packing in (("own", exchange.pack), ("whole experts", pack_from_whole_experts)):
        with meters.phase(name), mock.patch.object(exchange, "pack", packing):
            report = case.resharder.run()
        found["differing"] += case.differing()
        found[name] = meters.snapshot()["phases"][name]["copies"]["transposing_on_device"]["bytes"]
    return found | {"sent": report.expert_bytes_sent, "copied": report.expert_bytes_copied}


def pack_from_whole_experts(side: exchange.Side, direction: Direction, buffer: torch.Tensor) -> None:
    """Pack as the per-tensor path does: bring the tensor into file order, then take the slices to send."""
    whole = {chunk.shard: side.shards[chunk.shard].locate(side.tensors).contiguous() for chunk in direction.chunks}
    for chunk in direction.chunks:
        source = whole[chunk.shard][tuple(slice(*part) for part in chunk.narrow[: whole[chunk.shard].dim()])]
        side.staged(buffer, chunk, source.shape).copy_(source)


def fifty_steps() -> dict:
    """Reshard 50 times with changing weights; return differing and moved tensors, and allocated bytes around it."""
    case = Case(9, torch.bfloat16, 20_000)
    case.resharder.run()
    addresses, before = case.addresses(), torch.npu.memory_allocated()
    for _ in range(50):
        for value in case.source.values():
            value.neg_()
        case.resharder.run()
    for _ in range(100_000):  # one of gloo's threads may hold its last transfer a moment longer
        if torch.npu.memory_allocated() <= before:
            break
        os.sched_yield()
    after = torch.npu.memory_allocated()
    return {"differing": case.differing(), "moved": addresses != case.addresses(), "before": before, "after": after}


def rejected(case: Case) -> str:
    """Return the error with which the run was rejected, or ""."""
    try:
        case.resharder.run()
    except LayoutError as error:
        return str(error)
    return ""


def misfits() -> dict[str, str]:
    """Return this rank's errors for models that do not fit, on one rank or on all."""
    missing = Case(3, torch.float32, 1 << 20)
    if missing.rank == 2:
        del missing.target["model.norm.weight"]
    absent = rejected(missing)
    mixed = Case(3, torch.float32, 1 << 20)
    mixed.target["model.norm.weight"] = mixed.target["model.norm.weight"].bfloat16()
    cast = rejected(mixed)
    undeclared = rejected(Case(3, torch.bfloat16, 1 << 20, fp32_bias=True, castable=()))
    odd = Case(3, torch.float32, 1 << 20)
    if odd.rank == 3:
        odd.target["model.norm.weight"] = odd.target["model.norm.weight"].bfloat16()
    different = rejected(odd)
    other = Case(3, torch.float32, (1 << 20) if odd.rank else 2000)
    said = {"absent": absent, "cast": cast, "undeclared": undeclared, "different": different}
    return said | {"disagreed": rejected(other)}


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    results = {
        "layouts": many_layouts(60),
        # Use a separate seed: staging memory may still contain the bytes of an earlier case.
        "without waiting": without_waiting(1005),
        "staging": staging_by_bucket(),
        "received": [bytes_received(seed) for seed in range(6)],
        "verified": verified(),
        "rounded bias": rounded_bias(),
        "steady": steady_state(),
        "transposed": transposed_bytes(),
        "fifty steps": fifty_steps(),
        "misfits": misfits(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
