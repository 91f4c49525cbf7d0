"""Run updates of verl's own training engines, extended, with and without old log-probs of a separate forward.

For each engine and loss, `main(folder)` writes the update's metrics and a digest of its gradients to `<rank>.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import response_from_nested

from tests.stack_2026.routing_replay.program import Case, engine_of
from verl_plugin.onpolicy import update

# Tokens of each sample's prompt and answer. Samples are split over the ranks, and a micro batch has one.
SAMPLES = ((4, 5), (3, 3), (6, 6), (2, 5))
ENGINES = {
    "fsdp2": Case("fsdp2", "qwen3", "disabled", extended=False),
    "fsdp2 packed": Case("fsdp2", "qwen3", "disabled", packed=True, extended=False),
    "megatron": Case("megatron", "qwen3moe", "disabled", extended=False),
}
# At temperature 1 verl neither divides nor copies the logits; other temperatures reveal a missing division.
TEMPERATURES = {"fsdp2": 1.0, "fsdp2 packed": 0.7, "megatron": 0.7}
LOSSES = (("vanilla", "token-mean"), ("vanilla", "seq-mean-token-mean"), ("gspo", "seq-mean-token-mean"))
FAULTS = ("attached", "shifted", "mask")


def samples() -> dict[str, list[torch.Tensor]]:
    """Draw samples' tokens, and answers' masks, advantages and offsets of the rollout's log-probs ("off")."""
    generator = torch.Generator().manual_seed(11)
    answers = [answer for _, answer in SAMPLES]
    masks = [torch.ones(answer, dtype=torch.int64) for answer in answers]
    masks[2][2:4] = 0  # a tool's result within the answer
    return {
        "tokens": [torch.randint(3, 90, (sum(lengths),), generator=generator) for lengths in SAMPLES],
        "mask": masks,
        "advantages": [torch.randn(1, generator=generator).expand(answer).clone() for answer in answers],
        "off": [0.1 * torch.randn(answer, generator=generator) for answer in answers],
    }


def of_transformers(
    folder: Path, drawn: dict[str, list[torch.Tensor]], temperature: float
) -> dict[str, list[torch.Tensor]]:
    """Compute log-probs and entropy of the answers' tokens at `temperature`, with plain transformers on the host."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, list[torch.Tensor]] = {"log_probs": [], "entropy": []}
    with torch.no_grad():
        for tokens, (prompt, _) in zip(drawn["tokens"], SAMPLES, strict=True):
            logits = model(input_ids=tokens[None]).logits[0, prompt - 1 : -1]
            logs = (logits / temperature).log_softmax(-1)
            found["log_probs"].append(logs.gather(1, tokens[prompt:, None]).squeeze(1))
            found["entropy"].append(-(logs.exp() * logs).sum(-1))
    return found


def expected_metrics(
    drawn: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]], aggregation: str
) -> dict[str, float]:
    """Return the metrics that a step of all samples must report; tools' tokens do not count."""
    own = [mask.bool() for mask in drawn["mask"]]
    pairs = list(zip(right["log_probs"], drawn["off"], own, strict=True))
    apart = torch.cat([(log.exp() - (log + off).exp()).abs()[counted] for log, off, counted in pairs])
    entropies = [entropy[counted] for entropy, counted in zip(right["entropy"], own, strict=True)]
    means = torch.stack([each.mean() for each in entropies])
    return {
        "entropy": (torch.cat(entropies) if aggregation == "token-mean" else means).mean().item(),
        "training/rollout_probs_diff_max": apart.max().item(),
        "training/rollout_probs_diff_mean": apart.mean().item(),
        "training/rollout_probs_diff_std": apart.std().item(),
        "rollout_corr/log_ppl_abs_diff": sum(abs(off[counted].mean().item()) for _, off, counted in pairs) / len(pairs),
        # This one is not symmetric in the two sides.
        "rollout_corr/kl": torch.cat([off[counted] for _, off, counted in pairs]).mean().item(),
    }


def batch_of(drawn: dict[str, Any], right: dict[str, Any], own: range, packed: bool, temperature: float) -> Any:
    """Build the batch of this rank's samples as verl's workers get it."""

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([values[index] for index in own], layout=torch.jagged)

    prompts = [tokens[:prompt] for tokens, (prompt, _) in zip(drawn["tokens"], SAMPLES, strict=True)]
    answers = [tokens[prompt:] for tokens, (prompt, _) in zip(drawn["tokens"], SAMPLES, strict=True)]
    tensors = {
        "input_ids": nested(drawn["tokens"]),
        "position_ids": nested([torch.arange(len(tokens)) for tokens in drawn["tokens"]]),
        "prompts": nested(prompts),
        "responses": nested(answers),
        "response_mask": nested(drawn["mask"]),
        "loss_mask": nested(drawn["mask"]),
        "advantages": nested(drawn["advantages"]),
        "rollout_log_probs": nested([a + b for a, b in zip(right["log_probs"], drawn["off"], strict=True)]),
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1,
        "use_remove_padding": packed,
        "use_fused_kernels": False,
        "temperature": temperature,
        "global_batch_size": len(SAMPLES),
        "update_lr_scheduler": True,
    }
    return tu.get_tensordict(tensors, settings)


def gradients(engine: Any) -> str:
    """Return a SHA-256 digest of all gradients of this rank."""
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    found = []
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        gradient = parameter.grad if getattr(parameter, "main_grad", None) is None else parameter.main_grad
        found.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    total = hashlib.sha256()
    for gradient in found:
        total.update(gradient.cpu().numpy().tobytes())
    assert any(bool(gradient.any()) for gradient in found)
    return total.hexdigest()


def updated(engine: Any, batch: Any, loss: Any) -> dict[str, Any]:
    """Return the gradients and metrics of an update, without changing the weights."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(batch, loss, forward_only=False)
        found: dict[str, Any] = {"gradients": gradients(engine)}
    if engine.is_mp_src_rank_with_outputs():
        named = {name: each for name, each in output["metrics"].items() if name in METRICS}
        found["metrics"] = {name: each.aggregate() for name, each in named.items()}
    return found


METRICS = ("entropy", *(f"training/rollout_probs_diff_{name}" for name in ("max", "mean", "std")))
METRICS += ("rollout_corr/log_ppl_abs_diff", "rollout_corr/kl")


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Plant a fault in the loss: old log-probs keep their gradient and, if "shifted", are the previous token's."""
    right = update.own_loss

    def wrong(loss_function: Callable[..., Any], rows: Any, **named: Any) -> Any:
        def loss(*, model_output: Any, data: Any, dp_group: Any) -> Any:
            mask, log_probs = data["response_mask"], model_output["log_probs"]
            if fault == "shifted":
                rolled = log_probs.detach().values().roll(1)
                log_probs = torch.nested.nested_tensor_from_jagged(rolled, offsets=log_probs.offsets())
            data[update.OLD] = response_from_nested(log_probs, mask)
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

        return right(loss, rows, **named)

    update.own_loss = wrong
    try:
        yield
    finally:
        update.own_loss = right


def found_of(folder: Path, name: str, drawn: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    """Run an engine on this rank with each loss: upstream's way, this project's, and with each fault."""
    case = ENGINES[name]
    engine = engine_of(folder / case.model, case)
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    own = range(rank * len(SAMPLES) // ranks, (rank + 1) * len(SAMPLES) // ranks)
    new = partial(batch_of, drawn, right, own, case.packed, TEMPERATURES[name])
    found: dict[str, Any] = {}
    for mode, aggregation in LOSSES:
        actor = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=PolicyLossConfig(loss_mode=mode),
            loss_agg_mode=aggregation,
        )
        loss, with_old = partial(ppo_loss, config=actor), new()
        with engine.eval_mode():
            logs = engine.infer_batch(new())["model_output"]["log_probs"].cpu()
        with_old[update.OLD] = response_from_nested(logs, with_old["response_mask"])
        ways = {"upstream": updated(engine, with_old, loss), "own": updated(engine, new(), loss)}
        ways["expected"] = expected_metrics(drawn, right, aggregation)
        for fault in FAULTS:
            batch = new()
            if fault == "mask":
                batch["response_mask"].values()[-1] = 0
                ways[fault] = updated(engine, batch, loss)
            else:
                with planted(fault):
                    try:
                        ways[fault] = updated(engine, batch, loss)
                    except AssertionError:
                        ways[fault] = {"gradients": "none"}
        found[f"{mode} {aggregation}"] = ways
    return found


def main(folder: Path) -> None:
    import verl_plugin.megatron_float32
    import verl_plugin.onpolicy.engines  # noqa: F401  (after it: a test that imports this file imports no Megatron)

    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    drawn, found = samples(), {}
    # Do this before building an engine: verl replaces transformers' functions by the NPU's.
    right = {name: of_transformers(folder / case.model, drawn, TEMPERATURES[name]) for name, case in ENGINES.items()}
    for name in ENGINES:
        found[name] = found_of(folder, name, drawn, right[name])
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
