"""Ranks of a simulated training: weights and optimizer state sharded as by Megatron, in one process."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from post_training.checkpoint.training_rank import MegatronRank
from post_training.layouts import grouped_query
from post_training.layouts.layout import TrainPlacement
from post_training.models import deepseek_v3
from tests.post_training.layouts import grouped_query_reference, reference

ONE = TrainPlacement(1, 1, 1, 1, (3,))
STATES = ("master", "exp_avg", "exp_avg_sq")
MODELS = {
    "deepseek_v3": (deepseek_v3.table(reference.SMALL), reference.megatron_state, reference.SMALL),
    **{
        name: (grouped_query.table(shape), grouped_query_reference.megatron_state, shape)
        for name, shape in {
            "qwen2": grouped_query_reference.SMALL,
            "qwen2_tied": grouped_query_reference.TIED,
            "qwen3": grouped_query_reference.NORMED,
            "qwen3_moe": grouped_query_reference.WITH_EXPERTS,
        }.items()
    },
}


def full_states(model):
    """Return float32 values that bfloat16 cannot represent, by state and HF name."""
    generator = torch.Generator().manual_seed(3)
    shapes = MODELS[model][0].shapes
    return {state: {name: torch.rand(dims, generator=generator) for name, dims in shapes.items()} for state in STATES}


class Distributed:
    """The part of Megatron's DistributedOptimizer that is read. Each peer owns one contiguous range of all weights.

    Args:
        weights: parameters of one optimizer by local name.
        peers: number of ranks that share them.
        peer: index of this rank among the peers.
        states: float32 values by state and local name; without them the optimizer is new.
        steps: number of updates so far.
        form: `torch` counts steps in every parameter's state, `apex` in the group; `swap` is MindSpeed's, which keeps
            everything in host tensors and leaves its own tensors without memory.
    """

    def __init__(self, weights, peers, peer, states, steps, form):
        step_in_group = form == "apex"
        inner = _Adam if form == "torch" else SimpleNamespace
        self._ranges, total = {}, sum(weight.numel() for weight in weights.values())
        share = -(-total // peers)
        models, mains, kept, position = [], [], {}, 0
        for name, weight in weights.items():
            first, last = max(position, peer * share), min(position + weight.numel(), (peer + 1) * share)
            if first < last:
                interval = SimpleNamespace(start=first - position, end=last - position)
                self._ranges[id(weight)] = {"param": interval}
                main, state = self._created(name, weight, interval, states, steps, step_in_group)
                models.append(weight)
                mains.append(main)
                kept[main] = state
            position += weight.numel()
        group = {"params": mains, "lr": 1.0} | ({"step": steps} if step_in_group and states else {})
        self.optimizer = inner()
        self.optimizer.param_groups, self.optimizer.state = [group], kept
        if form == "swap":
            self.param_to_cpu_states_map = {main: _swapped(main, state) for main, state in kept.items()}
        half = weights and next(iter(weights.values())).dtype == torch.bfloat16
        self.model_float16_groups, self.model_fp32_groups = ([models], [[]]) if half else ([[]], [models])
        self.shard_fp32_from_float16_groups, self.shard_fp32_groups = ([mains], [[]]) if half else ([[]], [mains])

    def _created(self, name, weight, interval, states, steps, step_in_group):
        def cut(state):
            return states[state][name].reshape(-1)[interval.start : interval.end].clone()

        if weight.dtype == torch.bfloat16:
            main = cut("master") if states else torch.full((interval.end - interval.start,), torch.nan)
        else:
            main = weight.data.view(-1)[interval.start : interval.end]
        if not states:
            return main, {}
        state = {key: cut(key) for key in STATES[1:]}
        return main, state if step_in_group else state | {"step": torch.tensor(float(steps))}

    def _get_model_param_range_map(self, weight):
        return self._ranges[id(weight)]


def _swapped(main, state):
    """Return the host tensors of one parameter, and take the memory of its own tensors away."""
    state["step"] = torch.tensor(int(state["step"])) if state else None
    held = {"param": main.clone()} | {key: state.get(key, torch.zeros_like(main)).clone() for key in STATES[1:]}
    if state["step"] is None:
        del state["step"]
    for key in STATES[1:]:
        state[key] = torch.empty_like(main)
    for tensor in (main, *(state[key] for key in STATES[1:])):
        tensor.untyped_storage().resize_(0)
    return held


class _Adam(torch.optim.AdamW):
    def __init__(self):
        pass


def rank_of(model, placement: TrainPlacement, rank, full=None, steps=2, dtype=torch.bfloat16, form="torch"):
    """Return a rank with the values of `full`, or a new one whose weights are NaN."""
    table, cut, shape = MODELS[model]
    states = {state: cut(values, shape, placement, rank) for state, values in full.items()} if full else None
    shapes = cut({name: torch.empty(dims) for name, dims in table.shapes.items()}, shape, placement, rank)
    tensors = {}
    for name, like in shapes.items():
        values = states["master"][name] if states else torch.full_like(like, torch.nan)
        trained = not name.endswith("expert_bias")
        kind = dtype if trained else torch.float32
        tensors[name] = torch.nn.Parameter(values.to(kind), trained) if trained else values.to(kind)
    dense = {n: t for n, t in tensors.items() if t.requires_grad and ".experts." not in n}
    experts = {n: t for n, t in tensors.items() if t.requires_grad and ".experts." in n}
    data, expert_peer = placement.dp_rank(rank), placement.dp_rank(rank) // placement.ep
    parts = [Distributed(dense, placement.dp, data, states, steps, form)]
    if experts:
        parts.append(Distributed(experts, placement.dp // placement.ep, expert_peer, states, steps, form))
    return MegatronRank(table, placement, rank, tensors, SimpleNamespace(chained_optimizers=parts))


def save_all(folder, model, placement, full, **options):
    """Write every rank's file and the manifest, as `save_training` does."""
    from post_training.checkpoint.manifest import Manifest
    from post_training.checkpoint.training_files import file_name, write_file
    from verl_patches.features.training_checkpoint.saving import STEPS, entries_of

    manifest = Manifest({}, complete=True)
    for rank in range(placement.world_size):
        made = rank_of(model, placement, rank, full, **options)
        name, steps = file_name(rank, placement.world_size), options.get("steps", 2)
        manifest.files[name] = write_file(folder / name, entries_of(made), {STEPS: str(steps)})
    manifest.write(folder)
    return folder


def whole_states(folder, shapes):
    """Return every state of every HF tensor of a checkpoint, whole, by `state/name`."""
    from post_training.checkpoint.training_files import open_training_files

    found = {}
    for state, source in open_training_files(folder, shapes).sources.items():
        for name, tensor in source.tensors.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            source.read_into(name, tuple((0, extent) for extent in tensor.shape), whole)
            found[f"{state}/{name}"] = whole
    return found


def differences(found, expected):
    """Return the names of the tensors in which a rank differs from the expected one."""
    different = [name for name, tensor in expected.tensors.items() if not torch.equal(found.tensors[name], tensor)]
    for ours, theirs in zip(found.optimizer_shards, expected.optimizer_shards, strict=True):
        assert (ours.local, ours.start, ours.stop, ours.steps) == (
            theirs.local,
            theirs.start,
            theirs.stop,
            theirs.steps,
        )
        pairs = {"master": (ours.master, theirs.master)} | {
            name: (values, theirs.moments()[name]) for name, values in ours.moments().items()
        }
        assert set(pairs) == set(STATES)
        different += [f"{name} of {ours.local}" for name, (a, b) in pairs.items() if not torch.equal(a, b)]
    return different
