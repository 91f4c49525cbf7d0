"""A program for every rank: its own samples, batches of them in several orders, and deliberate faults."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from tensordict import TensorDict
from verl import DataProto

from verl_patches.features.sample_handles import store as module
from verl_patches.features.sample_handles.handles import (
    FIRST,
    ID,
    LENGTHS,
    DriverOfHandles,
    computed_columns,
)
from verl_patches.features.sample_handles.plan import SampleHandleError
from verl_patches.features.sample_handles.store import SampleStore

PADDING, PROMPT, RESPONSE = 0, 5, 6


def answers(first: int, samples: int, with_log_probs: bool) -> DataProto:
    """Return the whole batch of a generation, as verl's driver would collect it; it is equal on all ranks."""
    made = torch.Generator().manual_seed(first)
    lengths = (
        torch.randint(1, PROMPT + 1, (samples,), generator=made),
        torch.randint(1, RESPONSE + 1, (samples,), generator=made),
    )
    places = torch.arange(-PROMPT, RESPONSE)[None]
    attention = ((places >= -lengths[0][:, None]) & (places < lengths[1][:, None])).long()
    ids = torch.randint(1, 1000, attention.shape, generator=made) * attention + PADDING * (1 - attention)
    batch = {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": torch.cat(
            ((attention[:, :PROMPT].cumsum(-1) - 1).clamp(min=0), lengths[0][:, None] + torch.arange(RESPONSE)), dim=-1
        ),
    }
    if with_log_probs:
        drawn = -torch.rand((samples, RESPONSE), generator=made)
        batch["rollout_log_probs"] = drawn.masked_fill(attention[:, PROMPT:] == 0, -1.0)
    return DataProto.from_dict(batch)


def generate(
    store: SampleStore, driver: DriverOfHandles, share: int, with_log_probs: bool
) -> tuple[DataProto, DataProto]:
    """Generate `share` samples per rank. Return the batch that the driver sees, and all columns of the same samples."""
    rank, ranks, whole = dist.get_rank(), dist.get_world_size(), []

    def workers(prompts: DataProto) -> DataProto:
        everything = answers(prompts.meta_info[FIRST], share * ranks, with_log_probs)
        whole.append(everything)
        own = everything[rank * share : (rank + 1) * share]
        asked = {**prompts.meta_info, "pad_token_id": PADDING}
        names = sorted(store.keep(own, asked, torch.device("npu", torch.npu.current_device())).batch.keys())
        return everything.select(names)

    seen = driver.generating(workers)(DataProto(batch=TensorDict({}, batch_size=[share * ranks])))
    return seen, whole[0]


def of_rank(handles: DataProto, replica: int, replicas: int) -> DataProto:
    return handles.chunk(replicas)[replica]


def differing(found: DataProto, expected: DataProto) -> list[str]:
    """Return the columns of `expected` that are missing in `found` or differ."""
    return [
        name
        for name, values in expected.batch.items()
        if name not in found.batch.keys() or not torch.equal(found.batch[name].cpu(), values)
    ]


class Case:
    """One store, one driver, and batches in a seeded random order."""

    def __init__(self, tp: int, seed: int, with_log_probs: bool = True, shares: tuple[int, ...] = (2, 1)) -> None:
        self.store, self.step = SampleStore(), 1
        self.driver = DriverOfHandles(lambda each: each, lambda: self.step)
        self.replicas = dist.get_world_size() // tp
        self.replica = dist.get_rank() // tp
        pairs = [generate(self.store, self.driver, share, with_log_probs) for share in shares]
        seen, whole = (DataProto.concat(list(each)) for each in zip(*pairs, strict=True))
        order = torch.randperm(len(seen), generator=torch.Generator().manual_seed(seed))
        self.order = order[: len(order) // self.replicas * self.replicas].tolist()
        self.seen, self.whole = seen[self.order], whole[self.order]

    def handles(self, batch: DataProto | None = None) -> DataProto:
        return of_rank(self.driver.handles(self.seen if batch is None else batch), self.replica, self.replicas)

    def expected(self) -> DataProto:
        return of_rank(self.whole, self.replica, self.replicas)

    def wrong(self) -> list[str]:
        return differing(self.store.batch_of(self.handles(), self.replica), self.expected())


def exact(found: dict[str, Any]) -> None:
    found["wrong"] = {}
    for tp in (1, 2, 4):
        for seed in range(3):
            for with_log_probs in (True, False):
                case = Case(tp, seed, with_log_probs)
                found["wrong"][f"{tp} {seed} {with_log_probs}"] = case.wrong()


def one_exchange(found: dict[str, Any]) -> None:
    """Compute log-probs and update one batch. This takes one collective, which moves only the rank's own part."""
    case, calls = Case(2, 5, with_log_probs=False), []
    real = dist.all_to_all_single

    def counting(*given: Any, **named: Any) -> Any:
        calls.append(given[0].nbytes)
        return real(*given, **named)

    def reference(batch: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_prob": batch.batch["responses"].float() * 0.5})

    def train(batch: DataProto) -> DataProto:
        counted = batch.batch["attention_mask"][:, PROMPT:]
        expected = batch.batch["responses"].float() * 0.5 * counted
        found["reference is kept"] = torch.equal(batch.batch["ref_log_prob"], expected)
        found["old is absent"] = "old_log_probs" not in batch.batch.keys()
        found["advantages"] = torch.equal(batch.batch["advantages"].cpu(), advantages[first : first + len(batch)])
        return DataProto(meta_info={"metrics": {}})

    scores = torch.arange(len(case.seen), dtype=torch.float32)[:, None]
    advantages = scores * case.whole.batch["attention_mask"][:, PROMPT:]
    first = case.replica * (len(case.seen) // case.replicas)
    case.seen.batch["advantages"] = advantages
    with mock.patch.object(module.dist, "all_to_all_single", counting):
        answered = case.store.log_probs(reference, case.handles(), case.replica)
        sent = set(answered.batch.keys())
        found["reference is not sent"] = sent == {"ref_log_prob_kept"} and len(answered) == len(case.handles())
        dealt = case.driver.updating(lambda handles: of_rank(handles, case.replica, case.replicas))(case.seen)
        case.store.update(train, dealt, case.replica)
    found["collectives"] = len(calls)
    found["bytes"] = calls[0], 4 * int(case.expected().batch["attention_mask"].sum())
    found["empty after the update"] = case.store.is_empty


def sent_bytes(found: dict[str, Any]) -> None:
    """Measure the bytes that the driver pickles for a step of 512 samples, in 8 parts for 4 ranks each."""
    stored: list[Any] = []
    driver = DriverOfHandles(lambda each: stored.append(each) or "a reference", lambda: 1)
    batch = answers(1, 512, True)
    seen = driver.generating(lambda prompts: batch.select(["responses", "attention_mask"]))(
        DataProto(batch=TensorDict({}, batch_size=[512]))
    )
    seen.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
    seen.batch["advantages"] = torch.randn(512, 1) * seen.batch["attention_mask"][:, PROMPT:]
    parts = [*driver.handles(seen).chunk(8), *driver.handles(seen, computed_columns(seen)).chunk(8), *stored]
    found["pickled"] = sum(len(pickle.dumps(part)) for part in parts)


def failures(found: dict[str, Any]) -> None:
    case = Case(1, 1)
    try:
        case.store.log_probs(lambda batch: 1 / 0, case.handles(), case.replica)
    except ZeroDivisionError:
        found["empty after a failure"] = case.store.is_empty
    case = Case(1, 1)
    old = case.seen
    case.store.clear()
    generate(case.store, case.driver, 2, True)
    case.step = 7
    try:
        case.store.batch_of(case.handles(old), case.replica)
    except SampleHandleError as error:
        found["of the step before"] = str(error)


def looked_at_only(found: dict[str, Any]) -> None:
    """Answers of a validation and greedy ones for a baseline stay verl's own, and no worker keeps them."""
    store, seen = SampleStore(), []
    driver = DriverOfHandles(lambda each: each, lambda: 1)

    def workers(prompts: DataProto) -> DataProto:
        seen.append(dict(prompts.meta_info))
        own = answers(0, 4, True)
        asked = {**prompts.meta_info, "pad_token_id": PADDING}
        return store.keep(own, asked, torch.device("npu", torch.npu.current_device()))

    found["whole"] = []
    for meta in ({"validate": True}, {"do_sample": False}, {}):
        prompts = DataProto(batch=TensorDict({}, batch_size=[4]), meta_info=meta)
        returned = driver.generating(workers)(prompts)
        found["whole"].append(["input_ids" in returned.batch.keys(), ID in returned.batch.keys(), store.is_empty])
    found["first"] = [FIRST in meta for meta in seen]


def controls(found: dict[str, Any]) -> None:
    """Make faults that the comparison must detect."""
    case = Case(2, 3)
    case.seen.batch[ID] = case.seen.batch[ID].sort().values  # another order than the batch's
    case.seen.batch[LENGTHS] = case.seen.batch[LENGTHS][torch.tensor(case.order).argsort()]
    found["identity"] = case.wrong()

    def swapped(*given: Any) -> Any:
        plan = real(*given)
        if dist.get_rank() != 0:
            return plan
        return type(plan)(tuple(rows[::-1] for rows in plan.sent), plan.received, plan.place)

    real: Callable[..., Any] = module.plan_exchange
    case = Case(4, 4, with_log_probs=False, shares=(4,))
    same = torch.full_like(case.seen.batch[LENGTHS], 1)
    found["lengths differ"] = not torch.equal(case.seen.batch[LENGTHS], same)
    with mock.patch.object(module, "plan_exchange", swapped):
        found["sender's order"] = case.wrong()


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    found: dict[str, Any] = {}
    for part in (exact, one_exchange, sent_bytes, failures, looked_at_only, controls):
        part(found)
    (folder / f"{rank}.json").write_text(json.dumps(found))
