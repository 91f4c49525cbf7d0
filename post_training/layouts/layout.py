"""The layout of a model: which slice of which HuggingFace tensor each rank holds, and its place in the rank's memory.

Every sharding spec (`deepseek_v3.py`) describes a rank as a list of `Shard`. Loading, resharding and verification read
the same shards, so they cannot disagree about the place of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a table of numbers needs families of models and no torch
    import torch

Slice = tuple[tuple[int, int], ...]
"""A region of a tensor: one half-open interval `(start, stop)` per dimension."""

PADDING = ""
"""The HF name of memory that belongs to no HuggingFace tensor (padded vocabulary rows). Its content is zero."""

EXPERT_MARK = ".mlp.experts."
"""Part of the HF name of every routed expert's weight, and of no other tensor's."""


@dataclass(frozen=True, slots=True)
class LocalView:
    """A view into a local tensor: reshape, then index, then an optional transpose. Nothing is ever copied.

    Attributes:
        shape: the whole local tensor is first viewed with this shape; None keeps its own.
        index: one entry for each leading dimension, an int (the dimension disappears) or `(start, stop)`.
        transposed: whether the two remaining dimensions are swapped, for memory that holds the transpose of the
            HuggingFace tensor.
    """

    shape: tuple[int, ...] | None = None
    index: tuple[int | tuple[int, int], ...] = ()
    transposed: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view. Raises RuntimeError (from torch) if `tensor` cannot be viewed with `shape`."""
        if self.shape is not None:
            tensor = tensor.view(self.shape)
        if self.index:
            tensor = tensor[tuple(step if isinstance(step, int) else slice(*step) for step in self.index)]
        return tensor.t() if self.transposed else tensor


WHOLE = LocalView()


@dataclass(frozen=True, slots=True)
class Shard:
    """One slice of one HF tensor, held by one rank.

    Attributes:
        hf_name: name of the HuggingFace tensor, or PADDING.
        bounds: the region of that tensor (for PADDING: only its extents count).
        local: name of the tensor in the rank's own model.
        view: the region inside that local tensor; its shape equals the extents of `bounds`.
    """

    hf_name: str
    bounds: Slice
    local: str
    view: LocalView = WHOLE

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.bounds)

    def locate(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return this shard's live memory. Raises KeyError for an absent tensor, ValueError for an unexpected shape."""
        try:
            tensor = tensors[self.local]
        except KeyError:
            raise KeyError(
                f"the layout expects a local tensor {self.local!r}, which this model does not have"
            ) from None
        try:
            found = self.view.of(tensor.data)
        except (RuntimeError, IndexError) as error:
            raise ValueError(
                f"{self.local}: a tensor of shape {tuple(tensor.shape)} does not fit its layout"
            ) from error
        if tuple(found.shape) != self.extents:
            raise ValueError(
                f"{self.local}: the layout places {self.hf_name or 'padding'} {self.bounds} in a region of shape "
                f"{tuple(found.shape)} (whole tensor: {tuple(tensor.shape)})"
            )
        return found


def whole_slice(shape: Iterable[int]) -> Slice:
    """Return the slice that covers a tensor of this shape."""
    return tuple((0, extent) for extent in shape)


def as_matrix(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the shape in which slices are cut: more than two dimensions become a matrix with the first one's rows.

    >>> as_matrix((1280, 3, 2, 14, 14))  # the convolution of a vision tower
    (1280, 1176)
    """
    extents = tuple(shape)
    return extents if len(extents) <= 2 else (extents[0], prod(extents[1:]))


def share(extent: int, parts: int, index: int, what: str) -> tuple[int, int]:
    """Return the interval of part `index` of `parts` equal parts. Raises ValueError if `extent` does not divide."""
    if extent % parts:
        raise ValueError(f"{what}: {extent} cannot be divided by {parts}")
    size = extent // parts
    return index * size, (index + 1) * size


@dataclass(frozen=True)
class LayerSlot:
    """One transformer layer of a pipeline stage: global number, model chunk (virtual stage) and number in the chunk."""

    layer: int
    chunk: int
    position: int


@dataclass(frozen=True)
class TrainPlacement:
    """Megatron core_r0.8.0's order of ranks (parallel_state, order "tp-cp-ep-dp-pp", context parallel size 1).

    Attributes:
        tp, pp, ep, dp: sizes; `dp` counts all data parallel ranks, including expert parallel ones, so `ep` divides it.
        num_layer_list: layers of every stage; with `virtual_stages` chunks per stage, entry `chunk * pp + stage`.
        moe_tp_extend_ep: whole experts over the TP x EP group; otherwise experts over EP and each expert cut over TP.
        vocab_padded: rows of embedding and output layer over all TP ranks; None if the vocabulary is not padded.
    """

    tp: int
    pp: int
    ep: int
    dp: int
    num_layer_list: tuple[int, ...]
    moe_tp_extend_ep: bool = True
    virtual_stages: int = 1
    vocab_padded: int | None = None

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.ep, self.dp, self.virtual_stages) < 1:
            raise ValueError(f"parallel sizes must be positive: {self}")
        if self.dp % self.ep:
            raise ValueError(f"expert parallel size {self.ep} must divide data parallel size {self.dp}")
        if len(self.num_layer_list) != self.pp * self.virtual_stages:
            raise ValueError(
                f"num_layer_list {self.num_layer_list} needs {self.pp * self.virtual_stages} entries "
                f"(pipeline size {self.pp} x {self.virtual_stages} virtual stages)"
            )

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def pp_rank(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def ep_rank(self, rank: int) -> int:
        return self.dp_rank(rank) % self.ep

    def tp_ep_rank(self, rank: int) -> int:
        """Return the rank in the tensor-and-expert group, in which the tensor parallel index varies fastest."""
        return self.ep_rank(rank) * self.tp + self.tp_rank(rank)

    @cached_property
    def _first_layers(self) -> tuple[int, ...]:
        return (0, *accumulate(self.num_layer_list))

    def layers(self, rank: int) -> tuple[LayerSlot, ...]:
        """Return the transformer layers of this rank, in local order."""
        stage = self.pp_rank(rank)
        slots = []
        for chunk in range(self.virtual_stages):
            part = chunk * self.pp + stage
            first = self._first_layers[part]
            slots += [LayerSlot(first + position, chunk, position) for position in range(self.num_layer_list[part])]
        return tuple(slots)

    def chunk_prefix(self, chunk: int) -> str:
        """Return the prefix that tells apart equal names in a rank's chunks; empty without virtual stages."""
        return f"chunks.{chunk}." if self.virtual_stages > 1 else ""


@dataclass(frozen=True)
class RolloutPlacement:
    """vLLM 0.9.1's order of ranks: instance, then data parallel, then tensor parallel (fastest).

    Attributes:
        tp, dp: sizes inside one instance; `instances` independent copies fill the world.
        ep: 1, or tp * dp if expert parallelism is enabled; with 1 every expert is cut over tp * dp.
        shared_expert_replicated: whether vllm-ascend keeps the whole shared expert on every rank
            (enable_multistream_moe or enable_prefill_optimizations); otherwise it is cut over tp.
        lm_head_tp: vllm-ascend's own tensor parallel size of the output layer; None means tp.
        vocab_multiple: vLLM pads the vocabulary to a multiple of this.
    """

    tp: int
    dp: int = 1
    ep: int = 1
    instances: int = 1
    shared_expert_replicated: bool = False
    lm_head_tp: int | None = None
    vocab_multiple: int = 64

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.instances) < 1:
            raise ValueError(f"parallel sizes must be positive: {self}")
        if self.ep not in (1, self.tp * self.dp):
            raise ValueError(f"rollout expert parallel size is 1 or tp * dp = {self.tp * self.dp}, not {self.ep}")

    @property
    def world_size(self) -> int:
        return self.tp * self.dp * self.instances

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def tp_dp_rank(self, rank: int) -> int:
        """Return the rank in vLLM's expert group (data parallel x tensor parallel)."""
        return rank % (self.tp * self.dp)

    @property
    def lm_head_size(self) -> int:
        return self.lm_head_tp or self.tp

    def experts(self, rank: int, count: int) -> tuple[int, int]:
        """Return the experts of this rank, first and end: equal shares, and the last rank also takes the remainder."""
        if self.ep == 1:
            return 0, count
        size = count // self.ep
        index = self.tp_dp_rank(rank)
        return index * size, count if index == self.ep - 1 else (index + 1) * size


def vocabulary_shards(hf_name: str, local: str, valid: int, hidden: int, rows: tuple[int, int]) -> list[Shard]:
    """Return the shards of a weight that holds `rows` of a padded vocabulary with `valid` real rows."""
    first, last = rows
    real = min(max(valid - first, 0), last - first)
    shards = []
    if real:
        shards.append(Shard(hf_name, ((first, first + real), (0, hidden)), local, LocalView(index=((0, real),))))
    if real < last - first:
        index = ((real, last - first),)
        shards.append(Shard(PADDING, ((0, last - first - real), (0, hidden)), local, LocalView(index=index)))
    return shards


def megatron_vocabulary_shards(
    hf_name: str, local: str, valid: int, hidden: int, placement: TrainPlacement, rank: int
) -> list[Shard]:
    """Return embedding or output layer of a training rank. Raises ValueError if its rows do not divide over `tp`."""
    padded = placement.vocab_padded or valid
    rows = share(padded, placement.tp, placement.tp_rank(rank), "vocabulary rows over tensor parallel ranks")
    return vocabulary_shards(hf_name, local, valid, hidden, rows)


def rollout_vocabulary_shards(
    name: str, valid: int, hidden: int, placement: RolloutPlacement, parts: int, rank: int
) -> list[Shard]:
    """Return embedding or output layer of a rollout rank, padded as in vLLM and divided over `parts` ranks.

    Raises ValueError if its rows do not divide.
    """
    padded = -(-valid // placement.vocab_multiple) * placement.vocab_multiple
    rows = share(padded, parts, rank % parts, f"{name} over tensor parallel ranks")
    return vocabulary_shards(name, name, valid, hidden, rows)


def cut_shard(hf_name: str, dims: tuple[int, ...], local: str, dimension: int, parts: int, index: int) -> Shard:
    """Return a shard that fills a local weight: part `index` of `parts` along `dimension`.

    Raises ValueError if the dimension does not divide.
    """
    bounds = list(whole_slice(dims))
    bounds[dimension] = share(dims[dimension], parts, index, hf_name)
    return Shard(hf_name, tuple(bounds), local)


def gate_up_shards(prefix: str, local: str, hidden: int, width: int, parts: int, index: int) -> list[Shard]:
    """Return gate_proj above up_proj in one local weight, each divided over `parts` ranks."""
    interval = share(width, parts, index, prefix + "gate_proj.weight")
    rows = interval[1] - interval[0]
    bounds = (interval, (0, hidden))
    return [
        Shard(f"{prefix}gate_proj.weight", bounds, local, LocalView(index=((0, rows),))),
        Shard(f"{prefix}up_proj.weight", bounds, local, LocalView(index=((rows, 2 * rows),))),
    ]


def gated_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the three HuggingFace weights of a gated feed-forward network, with their shapes."""
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }


@dataclass(frozen=True)
class Table:
    """The sharding spec of one model, bound to its sizes: all that loading, resharding and verification know of it.

    Attributes:
        layers: number of transformer layers.
        shapes: name and shape of every HuggingFace tensor.
        megatron, vllm_ascend: return the shards of one rank, or raise ValueError for a placement that does not fit.
        castable: endings of names whose type may differ between training and rollout.
        float32: endings of names that training, rollout, checkpoints and exports keep in float32 in every job.
        ignored_in_files: prefixes of tensors that a checkpoint may have and no layout uses.
        prediction_layer: returns name and shape of the HuggingFace tensors of a layer for multi-token prediction, by
            its number; None for a model without such layers.
    """

    layers: int
    shapes: Mapping[str, tuple[int, ...]]
    megatron: Callable[[TrainPlacement, int], list[Shard]]
    vllm_ascend: Callable[[RolloutPlacement, int], list[Shard]]
    castable: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    ignored_in_files: tuple[str, ...] = ()
    prediction_layer: Callable[[int], Mapping[str, tuple[int, ...]]] | None = None


def matrix_table(table: Table) -> Table:
    """Return the table with tensors of more than two dimensions as matrices: a reshard plans rows and columns."""
    if all(len(shape) <= 2 for shape in table.shapes.values()):
        return table
    return replace(
        table,
        shapes={name: as_matrix(shape) for name, shape in table.shapes.items()},
        megatron=lambda placement, rank: matrix_shards(table.megatron(placement, rank), table.shapes),
        vllm_ascend=lambda placement, rank: matrix_shards(table.vllm_ascend(placement, rank), table.shapes),
    )


def matrix_shards(shards: Iterable[Shard], shapes: Mapping[str, tuple[int, ...]]) -> list[Shard]:
    """Describe shards of tensors with more than two dimensions as rows of matrices, in the same memory.

    >>> whole = Shard("conv", ((0, 4), (0, 3), (0, 2)), "conv")
    >>> [(shard.bounds, shard.view.shape) for shard in matrix_shards([whole], {"conv": (8, 3, 2)})]
    [(((0, 4), (0, 6)), (4, 6))]

    Raises:
        ValueError: a shard of such a tensor has only part of a row, or is only part of a local tensor.
    """
    return [shard if len(shard.bounds) <= 2 else _matrix_shard(shard, shapes[shard.hf_name]) for shard in shards]


def _matrix_shard(shard: Shard, shape: tuple[int, ...]) -> Shard:
    if shard.bounds[1:] != whole_slice(shape[1:]) or shard.view != WHOLE:
        raise ValueError(f"{shard.hf_name}: only whole rows of a tensor with {len(shape)} dimensions can be moved")
    rows, width = shard.bounds[0], as_matrix(shape)[1]
    return replace(shard, bounds=(rows, (0, width)), view=LocalView(shape=(rows[1] - rows[0], width)))
