"""Four ranks that reshard over many pairs of layouts and compare every rollout tensor with the naive reference."""

import json
import os
import random
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from npu_emulator import meters
from tests.verl_patches.features.reshard.reference import (
    SMALL,
    State,
    full_weights,
    megatron_state,
    rollout_state,
    same_bits,
)
from verl_patches.features.reshard import exchange
from verl_patches.features.reshard.deepseek_v3 import CASTABLE, megatron, vllm_ascend
from verl_patches.features.reshard.layout import EXPERT_MARK, RolloutPlacement, TrainPlacement
from verl_patches.features.reshard.plan import LayoutError
from verl_patches.features.reshard.resharder import Resharder
from verl_patches.features.reshard.schedule import Direction

WORLD = 4
BIAS = "mlp.gate.e_score_correction_bias"


def placements(seed: int) -> tuple[TrainPlacement, RolloutPlacement]:
    """A random pair of layouts of four ranks."""
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
        castable: tuple[str, ...] = CASTABLE,
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

    def assert_exact(self) -> None:
        for name, value in self.expected.items():
            assert same_bits(self.target[name].cpu(), value), (name, self.train, self.rollout)


def check_many_layouts(count: int) -> int:
    """Random pairs, types and buckets, each exact after its first and after its second run."""
    for seed in range(count):
        draw = random.Random(seed)
        dtype = draw.choice([torch.bfloat16, torch.float32])
        bucket, nodes = draw.choice([1500, 5000, 1 << 20]), draw.choice([None, 2])
        case = Case(seed, dtype, bucket, draw.random() < 0.5, draw.random() < 0.5, nodes)
        first = case.resharder.run()
        case.assert_exact()
        addresses = {name: value.data_ptr() for name, value in case.target.items()}
        for value in case.source.values():
            value.mul_(2)
        case.full = {name: value * 2 for name, value in case.full.items()}
        case.expected = rollout_state(case.full, SMALL, case.rollout, case.rank)
        again = case.resharder.run()
        case.assert_exact()
        assert addresses == {name: value.data_ptr() for name, value in case.target.items()}
        assert (again.object_collectives, again.plan_seconds) == (0, 0.0)
        assert again.collectives == again.rounds + 1 == first.rounds + 1
    return count


def check_staging_stays_in_the_bucket() -> dict[str, int]:
    """Smaller buckets mean more rounds and never more staging than two buckets."""
    rounds = {}
    for overlap in (False, True):
        for bucket in (1500, 6000, 100_000):
            report = (case := Case(7, torch.float32, bucket, overlap)).resharder.run()
            case.assert_exact()
            assert report.staging_bytes <= 2 * bucket
            rounds[f"{bucket} {overlap}"] = report.rounds
    assert rounds["1500 False"] > rounds["6000 False"] > rounds["100000 False"] == 1
    return rounds


def check_bytes_received(seed: int) -> dict[str, int]:
    """A rank receives each element that it does not hold exactly once, and experts only of the ones it serves."""
    case = Case(seed, torch.bfloat16, 1 << 20)
    report = case.resharder.run()
    need, have = coverage(case, vllm_ascend(SMALL, case.rollout, case.rank), case.expected)
    missing = {name: int((need[name] & ~have[name]).sum()) * 2 for name in need}
    assert report.bytes_received == sum(missing.values())
    assert report.expert_bytes_received == sum(size for name, size in missing.items() if EXPERT_MARK in name)
    sent = torch.tensor([report.bytes_sent - report.bytes_received], device="npu")
    dist.all_reduce(sent)
    assert int(sent) == 0
    return {"received": report.bytes_received, "experts": report.expert_bytes_received}


def coverage(case: Case, pieces: list, state: State) -> tuple[State, State]:
    """Which elements of every canonical tensor the rollout side needs and the training side has."""
    need, have = ({name: torch.zeros(v.shape, dtype=torch.bool) for name, v in case.full.items()} for _ in range(2))
    for marks, held in ((need, pieces), (have, megatron(SMALL, case.train, case.rank))):
        for piece in held:
            if piece.canonical:
                marks[piece.canonical][tuple(slice(*interval) for interval in piece.box)] = True
    return need, have


def check_verify_finds_one_flipped_byte() -> list[str]:
    case = Case(11, torch.bfloat16, 4000)
    case.resharder.run()
    assert case.resharder.verify() == []
    if case.rank == WORLD - 1:
        piece = next(p for p in case.resharder._rollout_layouts[case.rank] if p.canonical.endswith("up_proj.weight"))
        held = piece.locate(case.target)
        held[-1, -1] = (held[-1:, -1:].contiguous().view(torch.uint8) ^ 1).view(torch.bfloat16)[0, 0]
    found = case.resharder.verify()
    assert len(found) == 1 and found[0].endswith("up_proj.weight"), found
    case.resharder.run()
    assert case.resharder.verify() == []
    return found


def check_steady_state_costs() -> dict[str, int]:
    """Counted by the device: rounds, and one integer on whose sum all agree; each byte is copied where it leaves and
    where it lands, an expert's too."""
    case = Case(5, torch.bfloat16, 20_000)
    case.resharder.run()
    with meters.phase("steady"):
        report = case.resharder.run()
    counted = meters.snapshot()["phases"]["steady"]
    assert set(counted["collectives"]) == {"all_to_all", "all_reduce"}
    assert counted["collectives"]["all_to_all"][str(WORLD)]["count"] == report.rounds > 1
    assert counted["collectives"]["all_reduce"][str(WORLD)] == {"count": 1, "bytes": 4}
    assert report.collectives == report.rounds + 1
    moved = report.bytes_sent + report.bytes_received + report.bytes_copied
    assert counted["copies"]["device_to_device"]["bytes"] == moved
    return {
        "moved": moved,
        "host": sum(counted["copies"][way]["bytes"] for way in ("host_to_device", "device_to_host")),
    }


def check_experts_are_transposed_once() -> dict[str, int]:
    """Counted by the device: bytes that change their memory order are those of the experts that are sent, or that stay,
    and no others. A packing that turns a whole expert for the part of it that is sent is noticed."""
    case = Case(5, torch.bfloat16, 20_000)
    case.resharder.run()
    found = {}
    for name, packing in (("own", exchange.pack), ("whole experts", pack_from_whole_experts)):
        with meters.phase(name), mock.patch.object(exchange, "pack", packing):
            report = case.resharder.run()
        case.assert_exact()
        found[name] = meters.snapshot()["phases"][name]["copies"]["transposing_on_device"]["bytes"]
    assert found["own"] == report.expert_bytes_sent + report.expert_bytes_copied
    return found | {"sent": report.expert_bytes_sent, "copied": report.expert_bytes_copied}


def pack_from_whole_experts(side: exchange.Side, direction: Direction, buffer: torch.Tensor) -> None:
    """As the per-tensor way does it: bring the tensor into the order of the files, then take out what is sent."""
    whole = {chunk.piece: side.pieces[chunk.piece].locate(side.tensors).contiguous() for chunk in direction.chunks}
    for chunk in direction.chunks:
        source = whole[chunk.piece][tuple(slice(*part) for part in chunk.narrow[: whole[chunk.piece].dim()])]
        side.staged(buffer, chunk, source.shape).copy_(source)


def check_fifty_steps_leak_nothing() -> int:
    """Weights change every step; nothing stays allocated and no rollout weight moves."""
    case = Case(9, torch.bfloat16, 20_000)
    case.resharder.run()
    addresses = {name: value.data_ptr() for name, value in case.target.items()}
    allocated = torch.npu.memory_allocated()
    for _ in range(50):
        for value in case.source.values():
            value.neg_()
        case.resharder.run()
    case.assert_exact()
    assert addresses == {name: value.data_ptr() for name, value in case.target.items()}
    for _ in range(100_000):  # a thread of gloo's may hold its last transfer for a moment after that has ended
        if torch.npu.memory_allocated() <= allocated:
            break
        os.sched_yield()
    assert torch.npu.memory_allocated() <= allocated
    return allocated


def refused(case: Case) -> str:
    try:
        case.resharder.run()
    except LayoutError as error:
        return str(error)
    raise AssertionError("the run was not refused")


def check_misfits_are_refused_on_every_rank() -> list[str]:
    """A model that does not fit on one rank stops all ranks with the same sentence."""
    missing = Case(3, torch.float32, 1 << 20)
    if missing.rank == 2:
        del missing.target["model.norm.weight"]
    absent = refused(missing)
    assert "rank 2" in absent and "model.norm.weight" in absent
    mixed = Case(3, torch.float32, 1 << 20)
    mixed.target["model.norm.weight"] = mixed.target["model.norm.weight"].bfloat16()
    cast = refused(mixed)
    assert "model.norm.weight" in cast and "no cast is declared" in cast
    strict = Case(3, torch.bfloat16, 1 << 20, fp32_bias=True, castable=())
    undeclared = refused(strict)
    assert BIAS in undeclared and "no cast is declared" in undeclared
    odd = Case(3, torch.float32, 1 << 20)
    if odd.rank == 3:
        odd.target["model.norm.weight"] = odd.target["model.norm.weight"].bfloat16()
    different = refused(odd)
    assert "rank 3 holds" in different
    other = Case(3, torch.float32, (1 << 20) if odd.rank else 2000)
    disagreed = refused(other)
    assert "another reshard plan" in disagreed
    return [absent, cast, undeclared, different, disagreed]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    results = {
        "layouts": check_many_layouts(60),
        "rounds": check_staging_stays_in_the_bucket(),
        "received": [check_bytes_received(seed) for seed in range(6)],
        "flipped": check_verify_finds_one_flipped_byte(),
        "steady": check_steady_state_costs(),
        "transposed": check_experts_are_transposed_once(),
        "allocated": check_fifty_steps_leak_nothing(),
        "refused": check_misfits_are_refused_on_every_rank(),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
