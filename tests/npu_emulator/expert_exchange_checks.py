"""MC2 on several ranks, against every token computed alone. Each check takes a `collectives_program.Ranks`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch_npu

SIZE, CHOICES, EXPERTS_A_RANK = 6, 3, 3


class Case:
    """Tokens of every rank, from the same seeds on every rank; experts multiply by their number plus one."""

    def __init__(self, ranks, tokens: list[int], masked: bool = False, version: int = 2, spare: int = 0, group=None):
        self.ranks, self.version, self.experts = ranks, version, EXPERTS_A_RANK * ranks.size
        self.parts = [self._part(rank, count) for rank, count in enumerate(tokens)]
        self.x, self.chosen, self.scales = self.parts[ranks.rank]
        self.active = torch.arange(len(self.x)) < len(self.x) - 1 if masked else None
        self.common = dict(
            group_ep=(group or dist.group.WORLD)._get_backend(ranks.device).get_hccl_comm_name(ranks.rank),
            ep_world_size=ranks.size, ep_rank_id=ranks.rank, moe_expert_num=self.experts,
            global_bs=max(tokens) * ranks.size + spare,
            x_active_mask=None if self.active is None else self.active.to(ranks.device),
        )  # fmt: skip

    def _part(self, rank, count):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-8, 9, (count, SIZE), generator=generator).half()  # so that products are exact
        chosen = torch.stack([torch.randperm(self.experts, generator=generator)[:CHOICES] for _ in range(count)])
        return x, chosen.int(), torch.randint(1, 9, (count, CHOICES), generator=generator) / 8

    def dispatch(self, **options):
        operator = (torch_npu.npu_moe_distribute_dispatch, torch_npu.npu_moe_distribute_dispatch_v2)[self.version - 1]
        return operator(x=self.x.to("npu"), expert_ids=self.chosen.to("npu"), **self.common, **options)

    def combine(self, rows, dispatched, **options):
        operator = (torch_npu.npu_moe_distribute_combine, torch_npu.npu_moe_distribute_combine_v2)[self.version - 1]
        places = {("expand_idx", "assist_info_for_combine")[self.version - 1]: dispatched[2]}
        return operator(
            expand_x=rows, expert_ids=self.chosen.to("npu"), ep_send_counts=dispatched[4],
            expert_scales=self.scales.to("npu"), **places, **self.common, **options,
        )  # fmt: skip

    def rows_of(self, expert: int) -> list[tuple[int, torch.Tensor]]:
        """Return the rows that an expert gets, rank by rank and token by token."""
        found = []
        for rank, (x, chosen, _) in enumerate(self.parts):
            last = len(x) - (self.active is not None)
            found += [(rank, x[token]) for token in range(last) if expert in chosen[token].tolist()]
        return found

    def compute(self, dispatched):
        """Apply the experts of this rank to their rows."""
        rows, done = dispatched[0].clone(), 0
        for local, count in enumerate(dispatched[3].tolist()):
            rows[done : done + count] *= self.ranks.rank * EXPERTS_A_RANK + local + 1
            done += count
        return rows

    def expected(self):
        weights = (self.scales * (self.chosen + 1)).sum(-1, keepdim=True)
        out = self.x * weights
        if self.active is not None:
            out[~self.active] = 0
        return out.half()


def variants(ranks):
    sizes = [3 + rank for rank in range(ranks.size)]
    for version in (1, 2):
        for masked in (False, True):
            yield Case(ranks, sizes, masked, version, spare=5)


def rows_are_ordered_by_expert_then_rank_then_token(ranks):
    for case in variants(ranks):
        rows, _, _, counts, totals, *_ = case.dispatch()
        own = range(ranks.rank * EXPERTS_A_RANK, (ranks.rank + 1) * EXPERTS_A_RANK)
        expected = [case.rows_of(expert) for expert in own]
        assert counts.tolist() == [len(found) for found in expected] and counts.dtype == torch.int64
        flat = [row for found in expected for _, row in found]
        assert torch.equal(rows[: len(flat)].cpu(), torch.stack(flat))
        by_rank = [sum(source == rank for source, _ in found) for found in expected for rank in range(ranks.size)]
        assert totals.tolist() == torch.tensor(by_rank).cumsum(0).tolist() and totals.dtype == torch.int32
        assert rows.shape[0] == case.common["global_bs"] * CHOICES and rows[len(flat) :].isnan().all()
        running = case.dispatch(expert_token_nums_type=0)[3]
        assert running.tolist() == counts.cumsum(0).tolist()


def experts_outputs_come_back_weighted(ranks):
    for case in variants(ranks):
        dispatched = case.dispatch()
        out = case.combine(case.compute(dispatched), dispatched)
        assert torch.equal(out.cpu(), case.expected())


def what_tells_the_way_back_is_used(ranks):
    """If the places of rows are mixed up, tokens come back wrong."""
    for case in variants(ranks):
        dispatched = list(case.dispatch())
        rows = case.compute(dispatched)
        if case.version == 1:
            dispatched[2] = torch.zeros_like(dispatched[2])
        else:
            held = int(dispatched[4][-1])
            info = dispatched[2][: 3 * held].view(held, 3)
            info[:, 1:] = info[:, 1:].flip(-1) % 3
        wrong = not torch.equal(case.combine(rows, dispatched).cpu(), case.expected())
        anywhere = torch.tensor([float(wrong)], device=ranks.device)
        dist.all_reduce(anywhere)
        assert anywhere.item() > 0


def half_precision_sums_in_float32(ranks):
    case = Case(ranks, [4] * ranks.size)
    case.x = case.x.bfloat16()
    dispatched = case.dispatch()
    out = case.combine(dispatched[0], dispatched)
    expected = (case.x.float() * case.scales.sum(-1, keepdim=True)).bfloat16()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu(), expected)


def a_communicator_is_found_behind_groups_without_one(ranks):
    """vLLM makes groups of gloo for host tensors before the group that is looked up."""
    everyone = list(range(ranks.size))
    host, later = dist.new_group(everyone, backend="gloo"), dist.new_group(everyone)
    case = Case(ranks, [4] * ranks.size, group=later)
    assert case.common["group_ep"] != Case(ranks, [4] * ranks.size).common["group_ep"]
    dispatched = case.dispatch()
    assert torch.equal(case.combine(case.compute(dispatched), dispatched).cpu(), case.expected())
    for group in (host, later):
        dist.destroy_process_group(group)


def what_mc2_does_not_do_is_said(ranks):
    case = Case(ranks, [4] * ranks.size)
    for text, options in {
        "quant_mode 2 is not emulated": {"quant_mode": 2},
        "ranks of shared experts (shared_expert_rank_num 1) are not emulated": {"shared_expert_rank_num": 1},
        "a tensor parallel group (tp_world_size 2) is not emulated": {"tp_world_size": 2},
        "scales": {"scales": torch.ones(1, device=ranks.device)},
    }.items():
        raises(text, case.dispatch, **options)
    case.common["group_ep"] = "nobody"
    raises("no communicator nobody in this process", case.dispatch)
    case = Case(ranks, [4] * ranks.size)
    case.common["global_bs"] = 1
    raises("global_bs is too small", case.dispatch)


def raises(text: str, call: Callable, *arguments: object, **options: object) -> None:
    try:
        call(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"{text!r} was not raised")


CHECKS = [
    rows_are_ordered_by_expert_then_rank_then_token,
    experts_outputs_come_back_weighted,
    what_tells_the_way_back_is_used,
    half_precision_sums_in_float32,
    a_communicator_is_found_behind_groups_without_one,
]
REFUSALS = [what_mc2_does_not_do_is_said]
