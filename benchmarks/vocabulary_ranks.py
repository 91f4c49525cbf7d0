"""Ranks of `step_memory.py --vocabulary`: log-probs, entropy and their gradients by each way, on one output layer.

ours       post_training/models/megatron/chunked_log_probs.py, from hidden states
upstream   verl's functions on Megatron's cross entropy, from logits in float32
mindspeed  the same, with the maximum subtracted into a second tensor as MindSpeed does
published  the published recipe's two replacements: everything in the memory and in the type of the model's logits

Every rank writes `rank<n>.json`: by way the peak of the device's bytes in forward and backward above what was there
before, the seconds that both took, and the largest errors against float64.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import verl.workers.actor.megatron_actor as actor
import verl.workers.megatron_workers  # noqa: F401
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_patches.features import settings
from verl_patches.features.chunked_log_probs.deferred import deferring
from verl_patches.features.temperature.scaling import at_temperature

WAYS = ("ours", "published", "mindspeed", "upstream")
_LOGITS_STD = 2.5
"""Standard deviation of a trained model's logits."""
_CHUNK_OF_PUBLISHED = 1024
_HIDDEN_GRID, _WEIGHT_GRID = 16, 128


@dataclass(frozen=True)
class Request:
    """An output layer, its tokens, and the ways to measure.

    Attributes:
        tp: ranks that share the vocabulary.
        labels_masked: share of the tokens whose log-probs are masked.
    """

    tokens: int
    hidden: int
    vocabulary: int
    tp: int
    dtype: str = "bfloat16"
    sequence_parallel: bool = True
    temperature: float = 1.0
    entropy: bool = False
    chunk_bytes: int = 32 * 1024 * 1024
    labels_masked: float = 0.25
    against_float64: bool = False
    fuses_accumulation: bool = False
    wrapped: bool = True
    runs: int = 1
    ways: tuple[str, ...] = WAYS


class Head(MegatronModule):
    """The end of Megatron's GPTModel: the output layer, and batch before tokens."""

    def __init__(self, config: TransformerConfig, vocabulary: int) -> None:
        super().__init__(config)
        self.output_layer = ColumnParallelLinear(
            config.hidden_size, vocabulary, config=config, init_method=config.init_method, bias=False
            , gather_output=False,
        )  # fmt: skip

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens / TP, 1, hidden] to [1, tokens, vocabulary / TP]."""
        return self.output_layer(hidden)[0].transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Data:
    """Data on every rank's host: hidden [tokens, hidden], weight [vocabulary, hidden], and the rest [1, tokens]."""

    hidden: torch.Tensor
    weight: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    of_log_probs: torch.Tensor
    of_entropy: torch.Tensor


def make_data(request: Request) -> Data:
    """Draw hidden states as after a norm, and weights with which logits are as wide as a trained model's.

    Both are on grids on which float32 sums a logit's products exactly in any order, so that every way, and float64,
    rounds the same logit to bfloat16.
    """
    generator = torch.Generator().manual_seed(11)
    dtype = getattr(torch, request.dtype)
    tokens = request.tokens
    hidden = torch.randn(tokens, request.hidden, generator=generator)
    weight = torch.randn(request.vocabulary, request.hidden, generator=generator)
    weight.mul_(_LOGITS_STD / request.hidden**0.5)
    return Data(
        hidden=hidden.mul_(_HIDDEN_GRID).round_().div_(_HIDDEN_GRID).to(dtype),
        weight=weight.mul_(_WEIGHT_GRID).round_().div_(_WEIGHT_GRID).to(dtype),
        labels=torch.randint(0, request.vocabulary, (1, tokens), generator=generator),
        mask=torch.rand(1, tokens, generator=generator) >= request.labels_masked,
        of_log_probs=torch.randn(1, tokens, generator=generator),
        of_entropy=torch.randn(1, tokens, generator=generator),
    )


class Trial:
    """One output layer in Megatron's wrappers, with the data on the device."""

    def __init__(self, request: Request, data: Data) -> None:
        self.request, self.dtype = request, getattr(torch, request.dtype)
        rank = parallel_state.get_tensor_model_parallel_rank()
        config = TransformerConfig(
            num_layers=1, hidden_size=request.hidden, num_attention_heads=request.tp, params_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16, sequence_parallel=request.sequence_parallel and request.tp > 1,
            tensor_model_parallel_size=request.tp, perform_initialization=False,
            gradient_accumulation_fusion=request.fuses_accumulation,
        )  # fmt: skip
        self.head = Head(config, request.vocabulary).npu()
        with torch.no_grad():
            self.head.output_layer.weight.copy_(data.weight.chunk(request.tp)[rank])
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.head.output_layer.weight)
        module = self.head if self.dtype == torch.float32 else Float16Module(config, self.head)
        wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self.model = DistributedDataParallel(config, wrapping, module) if request.wrapped else module
        # A copy of its own: a view would keep the hidden states of all ranks.
        own = data.hidden.chunk(request.tp)[rank] if config.sequence_parallel else data.hidden
        self.hidden = own.clone().unsqueeze(1).npu().requires_grad_()
        self.labels, self.mask = data.labels.npu(), data.mask.npu()
        self.weights = (data.of_log_probs.npu(), data.of_entropy.npu())

    def processor(self, logits: Any, label: torch.Tensor, label_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return log-probs and entropy in verl's order and with verl's functions."""
        entropy = {"entropy": actor.vocab_parallel_entropy(logits)} if self.request.entropy else {}
        log_probs = actor.vocab_parallel_log_probs_from_logits(logits, label)
        return entropy | {"log_probs": log_probs.masked_fill(~label_mask, 0.0)}

    def forward(self, way: str) -> dict[str, torch.Tensor]:
        """Return log-probs and entropy by a way."""
        processor = at_temperature(self.processor, self.request.temperature)
        ours = way == "ours"
        whole = nullcontext(processor)
        with deferring(self.model, processor, self.request.chunk_bytes) if ours else whole as processor, _replaced(way):
            return processor(self.model(self.hidden), label=self.labels, label_mask=self.mask)

    def backward(self, found: dict[str, torch.Tensor]) -> None:
        """Compute the gradients of a weighted sum of all results."""
        loss = (found["log_probs"] * self.weights[0]).sum()
        if "entropy" in found:
            loss = loss + (found["entropy"] * self.weights[1]).sum()
        loss.backward()

    def gradient_of_weight(self) -> torch.Tensor:
        """Return the gradient that Megatron's optimizer reads or, without wrappers, the parameter's."""
        weight = self.head.output_layer.weight
        return weight.main_grad if self.request.wrapped else weight.grad

    def run(self, way: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return peak and seconds of forward and backward, and their results: values, and gradients of both inputs."""
        self.hidden.grad = self.head.output_layer.weight.grad = None
        if self.request.wrapped:
            self.model.zero_grad_buffer()
        torch.npu.synchronize()
        torch.npu.empty_cache()
        torch.npu.reset_peak_memory_stats()
        before, start = torch.npu.memory_allocated(), time.process_time()
        found = self.forward(way)
        forward = torch.npu.max_memory_allocated() - before
        torch.npu.synchronize()
        middle = time.process_time()
        self.backward(found)
        torch.npu.synchronize()
        cost = {
            "peak": torch.npu.max_memory_allocated() - before,
            "peak_forward": forward,
            "seconds": time.process_time() - start,
            "seconds_forward": middle - start,
        }
        gradients = {"hidden": self.hidden.grad.squeeze(1), "weight": self.gradient_of_weight()}
        return cost, {name: value.detach().cpu().clone() for name, value in (found | gradients).items()}


@contextmanager
def _replaced(way: str) -> Iterator[None]:
    """Replace Megatron's steps as MindSpeed or the published recipe does."""
    if way in ("ours", "upstream"):
        yield
        return
    published = way == "published"
    steps: dict[str, Any] = {
        "calculate_predicted_logits": staticmethod(_predicted_in_place if published else _predicted_in_a_copy)
    }
    if published:
        steps["calculate_logits_max"] = staticmethod(_maximum_in_place)
    # Megatron's wrapper of a bfloat16 model would hand float32 logits over, in which nothing is rounded or saved.
    converts = "megatron.core.transformer.module.float16_to_fp32"
    kept = mock.patch(converts, lambda output: output) if published else nullcontext()
    with mock.patch.multiple(VocabParallelCrossEntropy, **steps), kept:
        yield


def _maximum_in_place(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write float32 values back into the logits, a part of the vocabulary at a time: they keep their type."""
    for part in logits.split(_CHUNK_OF_PUBLISHED, dim=-1):
        part.copy_(part.float())
    return logits, logits.amax(-1)


def _predicted_in_place(
    logits: torch.Tensor, target: torch.Tensor, maximum: torch.Tensor, first: int, end: int
) -> tuple[torch.Tensor, ...]:
    """Subtract and exponentiate in the logits' memory and type."""
    return _predicted(logits.sub_(maximum.unsqueeze(-1)), target, first, end)


def _predicted_in_a_copy(
    logits: torch.Tensor, target: torch.Tensor, maximum: torch.Tensor, first: int, end: int
) -> tuple[torch.Tensor, ...]:
    """Subtract into a second tensor, and exponentiate there."""
    return _predicted(logits - maximum.unsqueeze(-1), target, first, end)


def _predicted(distances: torch.Tensor, target: torch.Tensor, first: int, end: int) -> tuple[torch.Tensor, ...]:
    elsewhere = (target < first) | (target >= end)
    columns = (target - first) * ~elsewhere
    own = distances.gather(-1, columns.unsqueeze(-1)).squeeze(-1) * ~elsewhere
    distances.exp_()
    return elsewhere, columns.flatten(), own, distances.sum(-1), distances


def exact(request: Request, data: Data) -> dict[str, torch.Tensor]:
    """Return values and gradients in float64, with plain torch; logits are rounded to the model's type."""
    hidden, weight = (tensor.double().requires_grad_() for tensor in (data.hidden, data.weight))
    logits = hidden @ weight.t()
    rounded = logits.detach().to(getattr(torch, request.dtype)).double()
    log_probs = ((logits + (rounded - logits.detach())) / request.temperature).log_softmax(-1)
    own = log_probs.gather(1, data.labels.t()).t().masked_fill(~data.mask, 0.0)
    found = {"log_probs": own}
    loss = (own * data.of_log_probs).sum()
    if request.entropy:
        found["entropy"] = -(log_probs.exp() * log_probs).sum(-1).unsqueeze(0)
        loss = loss + (found["entropy"] * data.of_entropy).sum()
    loss.backward()
    return {name: value.detach() for name, value in found.items()} | {"hidden": hidden.grad, "weight": weight.grad}


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    """Compare results with the exact ones.

    Log-probs and entropy: the largest deviation, relative to the value if that is above 1. Gradients: the norm of the
    deviation, relative to the gradient's norm.
    """
    result = {}
    for name, value in expected.items():
        deviation = found[name].double() - value.double()
        if name in ("hidden", "weight"):
            result[name] = (deviation.norm() / value.double().norm()).item()
        else:
            result[name] = (deviation.abs() / value.double().abs().clamp(min=1)).max().item()
    return result


def of_this_rank(request: Request, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's part of values of all tokens and the whole vocabulary."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    divided = {"weight"} | ({"hidden"} if request.sequence_parallel and request.tp > 1 else set())
    return {
        name: value.chunk(request.tp)[rank] if name in divided else value for name, value in expected.items()
    }  # fmt: skip


def measure(request: Request) -> dict[str, dict[str, Any]]:
    """Return the results of every way; the first run of each makes buffers and communicators."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=request.tp)
    data = make_data(request)
    expected = of_this_rank(request, exact(request, data)) if request.against_float64 else {}
    results: dict[str, dict[str, Any]] = {}
    upstream: dict[str, torch.Tensor] = {}
    with _fused_operator() if request.fuses_accumulation else nullcontext():
        trial = Trial(request, data)
        for way in sorted(request.ways, key="upstream".__ne__):
            for _ in range(request.runs):
                cost, found = trial.run(way)
            upstream = found if way == "upstream" else upstream
            results[way] = cost | {
                "from_float64": differences(found, expected),
                "from_upstream": differences(found, upstream),
            }
    return results


@contextmanager
def _fused_operator() -> Iterator[None]:
    """Provide the operator that Megatron expects in `fused_weight_gradient_mlp_cuda`: products summed in float32."""

    def add(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad_output.float().t() @ total_input.float())

    operators = SimpleNamespace(wgrad_gemm_accum_fp32=add)
    with mock.patch.multiple(
        layers, fused_weight_gradient_mlp_cuda=operators, _grad_accum_fusion_available=True, create=True
    ):
        yield


def main(folder: Path) -> None:
    """Measure the requests of request.json, each a dict of the fields of Request."""
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    settings.activate(settings.OverlaySettings())
    known = {field.name for field in fields(Request)}
    requests = json.loads((folder / "request.json").read_text())
    assert all(set(each) <= known for each in requests)
    found = [measure(Request(**each)) for each in requests]
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
