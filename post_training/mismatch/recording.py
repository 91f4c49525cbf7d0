"""Hooks on a running model that copy the values at the points of `points.py` to the host, row by row.

No code here is specific to a model family: vLLM uses the same names for the parts of all its decoders, and so does
Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from post_training.layouts.layout import LayerSlot
from post_training.layouts.model_tensors import unwrapped
from post_training.mismatch import points
from post_training.mismatch.dumps import Captured, Part, TokenSequence
from post_training.mismatch.points import of_layer
from post_training.mismatch.router_ties import tied_choices

NO_TOKEN = -1
"""Marks rows of a forward that are padding, or tokens that are not to be recorded."""


class Recorder:
    """One rank's recording. `rows` are the tokens of the running forward: int64 [tokens], None between forwards."""

    def __init__(self, sequences: Sequence[TokenSequence]) -> None:
        self.sequences = tuple(sequences)
        lengths = torch.tensor([0, *(len(each.tokens) for each in sequences)])
        self.begins = lengths.cumsum(0).tolist()
        self.rows: torch.Tensor | None = None
        self._predicts = torch.zeros(self.begins[-1] + 1, dtype=torch.bool)  # the last one is NO_TOKEN's
        for index in range(len(self.sequences)):
            self._predicts[list(self.response_rows(index))] = True
        self._found: dict[tuple[str, int], list[Captured]] = {}

    def response_rows(self, index: int) -> range:
        """Return the rows of a sequence at which its response is predicted."""
        first = self.begins[index] + len(self.sequences[index].prompt) - 1
        return range(first, first + len(self.sequences[index].response))

    def predicting(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows`, with `NO_TOKEN` for each that does not predict a token of a response."""
        return torch.where(self._predicts[rows], rows, NO_TOKEN)

    def record(self, point: str, values: torch.Tensor, rows: torch.Tensor | None = None, first_column: int = 0) -> None:
        """Keep `values` [tokens, ..., width] of the tokens `rows`, by default those of the running forward."""
        rows = self.rows if rows is None else rows
        if rows is None:
            return
        # Copy at once: later layers may write into the tensor or release its memory.
        values = values.detach().reshape(-1, values.shape[-1])[: len(rows)].to("cpu", copy=True)
        kept = rows != NO_TOKEN
        self._found.setdefault((point, first_column), []).append(Captured(rows[kept], values[kept]))

    def part(self) -> Part:
        """Return everything that was recorded."""
        return {
            place: Captured(torch.cat([each.rows for each in found]), torch.cat([each.values for each in found]))
            for place, found in self._found.items()
        }


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


class _Hooks(ExitStack):
    """Hooks that are removed at the end."""

    def after(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call `hook(module, arguments, output)` after each forward of `module`."""
        self.callback(module.register_forward_hook(hook).remove)

    def before(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call `hook(module, arguments, options)` before each forward of `module`."""
        self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


# ---- training


@contextmanager
def recorded_training(
    chunks: Sequence[nn.Module], slots: Sequence[LayerSlot], tp_rank: int, tp: int, vocabulary: int, recorder: Recorder
) -> Iterator[None]:
    """Record the forwards of this rank's Megatron model chunks, which take the recorder's sequences in order.

    Args:
        chunks: the model chunks.
        slots: maps the chunks' layers to layers of the model.
        tp_rank: this rank's tensor-parallel rank.
        tp: tensor-parallel size.
        vocabulary: the model's vocabulary size, without padding.
        recorder: receives the values.
    """
    models = [unwrapped(chunk) for chunk in chunks]
    with _Hooks() as hooks:
        for model in models:
            hooks.before(model, _PackedRows(recorder))
            hooks.after(model, lambda *_: setattr(recorder, "rows", None))
        keep = _ShardKeeper(recorder, tp_rank, tp)
        for slot in slots:
            _hook_training_layer(hooks, keep, models[slot.chunk].decoder.layers[slot.position], slot.layer)
        for model in models:
            if getattr(model, "embedding", None) is not None:
                hooks.after(model.embedding, keep.output(points.EMBEDDING))
            if getattr(model, "output_layer", None) is not None:
                hooks.after(model.decoder.final_layernorm, keep.output(points.FINAL_NORM))
                hooks.after(model.output_layer, keep.logits(vocabulary))
        yield


class _PackedRows:
    """Hook that sets the recorder's rows before a forward of packed sequences, each padded to a multiple of TP."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._next = recorder, 0

    def __call__(self, module: nn.Module, arguments: Any, options: Mapping[str, Any]) -> None:
        packed = options.get("packed_seq_params")
        if packed is None:
            raise RuntimeError("training does not pack its sequences here, so padding cannot be told from tokens")
        begins, edges = self._recorder.begins, packed.cu_seqlens_q_padded.tolist()
        rows = torch.full((edges[-1],), NO_TOKEN)
        for place in edges[:-1]:
            first, last = begins[self._next], begins[self._next + 1]
            rows[place : place + last - first] = torch.arange(first, last)
            self._next += 1
        self._recorder.rows = rows


class _ShardKeeper:
    """Makes hooks for outputs with all tokens or, under sequence parallelism, this rank's share of them."""

    def __init__(self, recorder: Any, tp_rank: int, tp: int) -> None:
        self._recorder, self._tp_rank, self._tp = recorder, tp_rank, tp

    def keep(self, point: str, values: torch.Tensor) -> None:
        rows = self.rows(point, values.numel() // values.shape[-1])
        if rows is not None:
            self._recorder.record(point, values, rows)

    def rows(self, point: str, count: int) -> torch.Tensor | None:
        """Return the tokens of an output with `count` rows; None if nothing is to be recorded."""
        rows: torch.Tensor | None = self._recorder.rows
        if rows is None or count == len(rows):
            return rows
        if count * self._tp != len(rows):
            raise RuntimeError(f"{point} has {count} rows for {len(rows)} tokens: context parallelism is not supported")
        return rows[self._tp_rank * count : (self._tp_rank + 1) * count]

    def output(self, point: str) -> Callable[..., None]:
        return lambda module, arguments, output: self.keep(point, _first(output))

    def logits(self, vocabulary: int) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            recorder, values = self._recorder, _first(output)
            if recorder.rows is None:
                return
            width = values.shape[-1]
            first = 0 if width >= vocabulary else self._tp_rank * width
            rows = recorder.predicting(recorder.rows)
            recorder.record(points.LOGITS, values[..., : max(vocabulary - first, 0)], rows, first)

        return keep


def _hook_training_layer(hooks: _Hooks, keep: _ShardKeeper, layer: nn.Module, number: int) -> None:
    for part, module in (
        (points.ATTENTION_NORM, layer.input_layernorm),
        (points.ATTENTION, layer.self_attention),
        (points.MLP_NORM, layer.pre_mlp_layernorm),
        (points.MLP, layer.mlp),
        (points.OUTPUT, layer),
    ):
        # A norm that is fused into the linear layer behind it leaves an identity in its place.
        if part not in (points.ATTENTION_NORM, points.MLP_NORM) or getattr(module, "weight", None) is not None:
            hooks.after(module, keep.output(of_layer(number, part)))
    after_attention = of_layer(number, points.AFTER_ATTENTION)
    hooks.before(layer.pre_mlp_layernorm, lambda module, arguments, options: keep.keep(after_attention, arguments[0]))
    router = getattr(layer.mlp, "router", None)
    if router is not None:
        hooks.after(router, _router_hook(keep, number))


def _router_hook(keep: _ShardKeeper, number: int) -> Callable[..., None]:
    """Return a hook that records a router's choice, which is its output, and its logits, which are recomputed."""

    def hook(router: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        tokens = arguments[0].reshape(-1, arguments[0].shape[-1])
        logits = functional.linear(tokens.float(), router.weight.float())
        keep.keep(of_layer(number, points.ROUTER_LOGITS), logits)
        keep.keep(of_layer(number, points.EXPERTS), _chosen(output))

    return hook


def _chosen(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the choice from a Megatron router's output: int64 [tokens, experts per token]."""
    chosen = output[1]
    if chosen.dtype == torch.bool:  # later releases of Megatron return a map [tokens, experts]
        chosen = chosen.nonzero()[:, 1].reshape(len(chosen), -1)
    return chosen.long()


class ChoiceSink(Protocol):
    """Interface that records choices of experts. `rows` are the tokens of the running forward, as in `Recorder`."""

    rows: torch.Tensor | None

    def record(self, point: str, values: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep `values` for the tokens `rows`, which have one entry for each row of `values`."""


class TrainingChoiceSink(ChoiceSink, Protocol):
    """A sink that distinguishes certain choices from those that depend on rounding."""

    records_ties: bool

    def record_ties(self, layer: int, tied: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep which of the tokens `rows` have tied experts, bool [tokens] (`mismatch/router_ties.py`)."""


@contextmanager
def recorded_training_choices(
    chunks: Sequence[nn.Module], slots: Sequence[LayerSlot], tp_rank: int, tp: int, recorder: TrainingChoiceSink
) -> Iterator[None]:
    """Record only the experts that the routers of this rank's Megatron model chunks choose."""
    models, keep = [unwrapped(chunk) for chunk in chunks], _ShardKeeper(recorder, tp_rank, tp)

    def hook(number: int) -> Callable[..., None]:
        def record(router: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            point, chosen = of_layer(number, points.EXPERTS), _chosen(output)
            rows = keep.rows(point, len(chosen))
            if rows is not None:
                recorder.record(point, chosen, rows)
                if recorder.records_ties:
                    recorder.record_ties(number, tied_choices(router, arguments[0]), rows)

        return record

    with _Hooks() as hooks:
        for slot in slots:
            router = getattr(models[slot.chunk].decoder.layers[slot.position].mlp, "router", None)
            if router is not None:
                hooks.after(router, hook(slot.layer))
        yield


# ---- rollout


@contextmanager
def recorded_rollout(runner: Any, sequences: Sequence[int], first_request: int, recorder: Recorder) -> Iterator[None]:
    """Record the forwards of vLLM-Ascend's model runner, and make it sample the recorder's responses.

    Args:
        runner: vLLM-Ascend's.
        sequences: for each request of this engine, in order, the index of its sequence in the recorder; indices beyond
            the last one belong to requests that only fill the batch.
        first_request: number of the first of these requests.
        recorder: receives the values.
    """
    model = runner.get_model()
    batch = _Batch(runner, recorder, sequences, first_request)
    with _Hooks() as hooks:
        hooks.before(model, batch.begin)
        hooks.after(model, batch.end)
        hooks.enter_context(mock.patch.object(runner, "_dummy_run", batch.dummy_runs.watched(runner._dummy_run)))
        hooks.before(runner.sampler, batch.keep_logits)
        hooks.enter_context(mock.patch.object(runner.sampler, "sample", batch.given_tokens))
        _hook_rollout_model(hooks, recorder, model.model)
        yield


class DummyRuns:
    """Detects a runner's dummy runs, which have no real tokens: an engine without requests runs them beside others."""

    def __init__(self) -> None:
        self.running = False

    def watched(self, dummy_run: Callable[..., Any]) -> Callable[..., Any]:
        """Return vLLM-Ascend's `dummy_run`, wrapped so that `running` is true while it runs."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.running = True
            try:
                return dummy_run(*arguments, **options)
            finally:
                self.running = False

        return run


class _Batch:
    """Maps the running batch of an engine to the recorder's sequences."""

    def __init__(self, runner: Any, recorder: Recorder, sequences: Sequence[int], first_request: int) -> None:
        self._runner, self._recorder = runner, recorder
        self._sequences, self._first_request = sequences, first_request
        self.dummy_runs = DummyRuns()
        self._last = torch.empty(0, dtype=torch.long)

    def _known(self) -> list[tuple[int, int | None]]:
        """Return for each request in the batch its number of output tokens, and its sequence or None."""
        found = []
        for name in self._runner.input_batch.req_ids:
            index = self._sequences[int(name) - self._first_request]
            put_out = len(self._runner.requests[name].output_token_ids)
            found.append((put_out, index if index < len(self._recorder.sequences) else None))
        return found

    def begin(self, module: nn.Module, arguments: Any, options: Mapping[str, Any]) -> None:
        if self.dummy_runs.running:
            return
        positions = options["positions"].tolist()
        requests = self._known()
        edges = self._runner.query_start_loc[: len(requests) + 1].tolist()
        rows = torch.full((edges[-1],), NO_TOKEN)
        for (_, index), first, last in zip(requests, edges, edges[1:], strict=False):
            if index is None:
                continue
            begin, tokens = self._recorder.begins[index], len(self._recorder.sequences[index].tokens)
            places = torch.tensor(positions[first:last])
            rows[first:last] = torch.where(places < tokens, places + begin, NO_TOKEN)
        self._recorder.rows = rows
        # A request whose prompt continues in the next forward has logits too, but they are not sampled from.
        self._last = self._recorder.predicting(rows[torch.tensor(edges[1:]) - 1])

    def end(self, *_: Any) -> None:
        self._recorder.rows = None

    def keep_logits(self, module: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        logits = options["logits"] if "logits" in options else arguments[0]
        self._recorder.record(points.LOGITS, logits, self._last)

    def given_tokens(self, logits: torch.Tensor, sampling_metadata: Any) -> torch.Tensor:
        """Replace sampling: return the next tokens of the responses, int64 [requests]."""
        tokens = []
        for put_out, index in self._known():
            response = () if index is None else self._recorder.sequences[index].response
            tokens.append(response[put_out] if put_out < len(response) else 0)
        return torch.tensor(tokens, device=logits.device)


def _hook_rollout_model(hooks: _Hooks, recorder: Recorder, decoder: nn.Module) -> None:
    def keep(point: str, of: Callable[[Any], torch.Tensor] = _first) -> Callable[..., None]:
        return lambda module, arguments, output: recorder.record(point, of(output))

    def before_norm(point: str) -> Callable[..., None]:
        return lambda module, arguments, options: recorder.record(point, arguments[0])

    hooks.after(decoder.embed_tokens, keep(points.EMBEDDING))
    hooks.after(decoder.norm, keep(points.FINAL_NORM))
    choices = _Choices(recorder)
    for number, layer in enumerate(decoder.layers):
        hooks.after(layer.input_layernorm, keep(of_layer(number, points.ATTENTION_NORM)))
        # Not from the attention and MLP modules: some models sum over tensor-parallel ranks after them.
        hooks.before(layer.post_attention_layernorm, before_norm(of_layer(number, points.ATTENTION)))
        hooks.after(layer.post_attention_layernorm, keep(of_layer(number, points.MLP_NORM)))
        hooks.after(
            layer.post_attention_layernorm, keep(of_layer(number, points.AFTER_ATTENTION), lambda output: output[1])
        )
        hooks.after(layer, keep(of_layer(number, points.MLP)))
        hooks.after(layer, keep(of_layer(number, points.OUTPUT), lambda output: output[0] + output[1]))
        if (gate := getattr(layer.mlp, "gate", None)) is not None:
            hooks.after(gate, keep(of_layer(number, points.ROUTER_LOGITS)))
            hooks.after(gate, choices.of_gate(number))
    choices.watch(hooks)


@contextmanager
def recorded_rollout_choices(decoder: nn.Module, recorder: ChoiceSink) -> Iterator[None]:
    """Record only the experts that vLLM-Ascend chooses in the layers of `decoder`."""
    choices = _Choices(recorder)
    with _Hooks() as hooks:
        for number, layer in enumerate(decoder.layers):
            if (gate := getattr(layer.mlp, "gate", None)) is not None:
                hooks.after(gate, choices.of_gate(number))
        choices.watch(hooks)
        yield


@dataclass(frozen=True)
class _Choice:
    """A call of an operator that chooses experts, and the call of the gate before it.

    Attributes:
        layer: number of the layer.
        rows: this engine's tokens, [tokens], on the host.
        gate_logits: of this engine's tokens, [tokens, experts], on the device.
        logits: of the tokens that the operator received, [tokens, experts], on the device.
        chosen: experts of these tokens, [tokens, experts per token], on the device.
    """

    layer: int
    rows: torch.Tensor
    gate_logits: torch.Tensor
    logits: torch.Tensor
    chosen: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.gate_logits.nbytes + self.logits.nbytes + self.chosen.nbytes


class _Choices:
    """Records the experts that vLLM-Ascend's operators choose.

    Between gate and choice the rows are divided over tensor-parallel ranks or gathered from data-parallel ones. So this
    engine's rows are found again by their logits, bit for bit: rows with equal logits get equal experts.
    """

    _HELD_BYTES = 32 << 20
    """Device memory of held calls before they are copied to the host: one copy per call would wait for the device."""

    def __init__(self, recorder: ChoiceSink) -> None:
        self._recorder = recorder
        self._asked: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._held: list[_Choice] = []

    def of_gate(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            rows = self._recorder.rows
            # Views, here and below: vLLM-Ascend empties tensors that it has used, but views keep their values.
            self._asked = None if rows is None else (number, rows, _first(output)[: len(rows)])

        return hook

    def watch(self, hooks: _Hooks) -> None:
        """Wrap both operators until `hooks` end; the second one is used where the first accepts too few experts."""
        import torch_npu
        from vllm_ascend.ops import common_fused_moe, fused_moe

        hooks.callback(self._record)
        self._watch(hooks, torch_npu, "npu_moe_gating_top_k")
        for module in (fused_moe, common_fused_moe):
            if hasattr(module, "select_experts"):
                self._watch(hooks, module, "select_experts")

    def _watch(self, hooks: _Hooks, place: Any, name: str) -> None:
        choose = getattr(place, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            output = choose(*arguments, **options)
            self._hold(options["router_logits"] if "router_logits" in options else arguments[0], output[1])
            return output

        hooks.enter_context(mock.patch.object(place, name, watched))

    def _hold(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        if self._asked is None:
            return
        self._held.append(_Choice(*self._asked, logits.detach(), chosen.detach()))
        if sum(each.nbytes for each in self._held) > self._HELD_BYTES:
            self._record()

    def _record(self) -> None:
        """Record the held calls, with one copy to the host for all of them."""
        if not self._held:
            return
        held, self._held = self._held, []
        own = _row_hashes([each.gate_logits for each in held])
        given = _row_hashes([each.logits for each in held])
        chosen = _on_host([each.chosen for each in held])
        for choice, mine, theirs, experts in zip(held, own, given, chosen, strict=True):
            if not len(theirs):
                continue
            known, first = np.unique(theirs, return_index=True)
            places = np.searchsorted(known, mine).clip(max=len(known) - 1)
            found = torch.from_numpy(known[places] == mine) & (choice.rows != NO_TOKEN)
            if found.any():
                there = torch.from_numpy(first[places])[found]
                self._recorder.record(of_layer(choice.layer, points.EXPERTS), experts[there].long(), choice.rows[found])


def _on_host(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.cat(tensors).cpu().split([len(each) for each in tensors])


def _row_hashes(tensors: list[torch.Tensor]) -> list[NDArray[np.uint64]]:
    """Return a 64-bit hash of each row of each tensor [rows, width]; other bytes practically never have the same."""
    rows = [each.contiguous().view(torch.uint8).numpy() for each in _on_host(tensors)]
    multipliers = np.random.default_rng(0).integers(1 << 64, size=rows[0].shape[1], dtype=np.uint64) | np.uint64(1)
    return [(each.astype(np.uint64) + np.uint64(1)) @ multipliers for each in rows]
