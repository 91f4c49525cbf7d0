"""Run verl's own training engines, extended, with experts that a test chooses for every token.

For each case, `main(folder)` writes to `<world>.<rank>.json` how far log-probs and gradients are from those of
`reference`, and the metrics of the update.
"""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch.distributed.tensor import DTensor
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    McoreEngineConfig,
    McoreOptimizerConfig,
)
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine import EngineRegistry

from tests.stack_2026.routing_replay.reference import Reference

# Number of tokens of each sample; the second half is the answer.
LENGTHS = (9, 6, 12, 7)
LEARNING = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """An engine and its batch.

    Attributes:
        backend: Engine backend, "megatron" or "fsdp2".
        model: Name of a model in `tests.stack_2026.vllm_ascend.models`.
        mode: verl's `router_replay.mode`.
        packed: Whether samples lie end to end instead of padded.
        recomputes: Whether the backward pass recomputes layers.
        micro: Samples per micro batch; 0 for micro batches of 24 tokens.
        stages: Number of pipeline stages.
        tensor: Number of tensor parallel ranks, which also share each sample's tokens (sequence parallelism).
        whole: Whether these ranks have whole experts, each its own, instead of a part of every expert.
        given: "random" experts, or the "preferred" ones that the model itself chooses.
        extended: Whether the engine has this project's replay.
        reference: Whether a second model, which is not trained, is built in the same process after the first.
        distributed: Whether Megatron's optimizer is distributed, verl's default; a rank then has part of the gradients.
    """

    backend: str
    model: str
    mode: str = "R3"
    packed: bool = False
    recomputes: bool = False
    micro: int = 2
    stages: int = 1
    tensor: int = 1
    whole: bool = False
    given: str = "random"
    extended: bool = True
    reference: bool = False
    distributed: bool = False

    @property
    def name(self) -> str:
        return " ".join(map(str, dataclasses.astuple(self)))


REPLAYED = {
    1: [
        Case("megatron", "qwen3moe", recomputes=True),
        Case("megatron", "deepseek", recomputes=True, micro=0, reference=True),
        Case("fsdp2", "qwen3moe", recomputes=True, reference=True),
        Case("fsdp2", "qwen3moe", packed=True, micro=0),
        Case("fsdp2", "deepseek", recomputes=True),
    ],
    2: [
        Case("megatron", "qwen3moe", micro=1),
        Case("megatron", "deepseek", recomputes=True),
        Case("megatron", "qwen3moe", recomputes=True, stages=2),
        Case("fsdp2", "qwen3moe", recomputes=True, micro=1),
        Case("megatron", "qwen3moe", tensor=2, micro=1),
        Case("megatron", "deepseek", tensor=2, recomputes=True, reference=True),
        Case("megatron", "qwen3moe", tensor=2, whole=True, recomputes=True),
        Case("megatron", "deepseek", tensor=2, whole=True, micro=0),
    ],
    4: [
        Case("megatron", "qwen3moe", tensor=2, recomputes=True),
        Case("megatron", "deepseek", tensor=2, micro=0),
    ],
}
COMPARED = {
    1: [
        Case("megatron", "qwen3moe", mode="disabled"),
        Case("fsdp2", "deepseek", mode="disabled"),
        Case("megatron", "qwen3moe", mode="disabled", given="preferred"),
        Case("fsdp2", "deepseek", mode="disabled", given="preferred"),
        Case("megatron", "deepseek", given="preferred"),
    ],
    2: [
        Case("megatron", "qwen3moe", mode="disabled", tensor=2, whole=True),
        Case("megatron", "deepseek", mode="disabled", given="preferred", tensor=2),
    ],
    4: [],
}
# verl without this project's engine extensions.
UPSTREAM = {1: [Case("megatron", "qwen3moe", extended=False)], 2: [], 4: []}


def experts_of(model: Any, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw experts for each sample's tokens, [tokens, layers, experts per token], from the groups that a token may use.

    Experts of the last token stay 0, as a rollout does not compute it, and so do those of dense layers.
    """
    count = getattr(model, "num_experts", None) or model.n_routed_experts
    groups, usable = getattr(model, "n_group", 1), getattr(model, "topk_group", 1)
    found = []
    for length in LENGTHS:
        drawn = torch.zeros(length, model.num_hidden_layers, model.num_experts_per_tok, dtype=torch.uint8)
        for token in range(length - 1):
            for layer in range(getattr(model, "first_k_dense_replace", 0), model.num_hidden_layers):
                chosen = torch.randperm(groups, generator=generator)[:usable] * (count // groups)
                members = (chosen[:, None] + torch.arange(count // groups)).flatten()
                order = torch.randperm(len(members), generator=generator)[: model.num_experts_per_tok]
                drawn[token, layer] = members[order]
        found.append(drawn)
    return found


def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the sum of the samples' log-probs times the number of ranks, over which verl averages."""
    values = model_output["log_probs"].values()
    offsets = data["input_ids"].offsets()
    wanted = torch.ones(len(values), dtype=torch.bool, device=values.device)
    wanted[offsets[1:] - 1] = False  # the last token's row predicts the next sample's first token
    return values[wanted].sum() * dist.get_world_size(dp_group), {}


def batch_of(samples: list[torch.Tensor], experts: list[torch.Tensor], case: Case) -> Any:
    """Build the batch as verl's workers get it."""
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    answers = [torch.ones(len(each) // 2, dtype=torch.int64) for each in samples]
    tensors = {
        "input_ids": nested(samples),
        "position_ids": nested([torch.arange(len(each)) for each in samples]),
        "response_mask": nested(answers),
        "loss_mask": nested(answers),
        "routed_experts": nested(experts),
    }
    settings = {
        "use_dynamic_bsz": case.micro == 0,
        "micro_batch_size_per_gpu": case.micro,
        "max_token_len_per_gpu": 24,
        "use_remove_padding": case.packed,
        "use_fused_kernels": False,
        "temperature": 1.0,
        "update_lr_scheduler": True,
    }
    if not case.extended:
        settings["enable_routing_replay"] = True  # set by verl's workers
    return tu.get_tensordict(tensors, settings)


def engine_of(folder: Path, case: Case, trains: bool = True) -> Any:
    """Build verl's engine for an NPU as its workers do: the actor's, or the reference's, which does not train."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # Megatron-core keeps the previous model's setting
    libraries = ["verl_plugin.megatron_core", "verl_plugin.megatron_float32"]
    libraries += ["verl_plugin.routing_replay.engines"] * case.extended
    attention = "flash_attention_2" if case.packed else "eager"
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        external_lib=libraries,
        use_remove_padding=case.packed,
        enable_gradient_checkpointing=case.recomputes,
        override_config={"attn_implementation": attention},
    )
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    common: dict[str, Any] = {
        "forward_only": not trains,
        "router_replay": EngineRouterReplayConfig(mode=case.mode),
        "use_dynamic_bsz": case.micro == 0,
        "use_remove_padding": case.packed,
    }
    if case.backend == "megatron":
        cut = 1 if case.whole else case.tensor
        recomputation = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        settings: Any = McoreEngineConfig(
            vanilla_mbridge=True,
            use_distributed_optimizer=case.distributed,
            tensor_model_parallel_size=case.tensor,
            expert_tensor_parallel_size=cut,
            expert_model_parallel_size=dist.get_world_size() // case.stages // cut,
            pipeline_model_parallel_size=case.stages,
            override_transformer_config=recomputation if case.recomputes else {},
            **common,
        )
        optimizer: Any = McoreOptimizerConfig(lr=LEARNING, total_training_steps=10)
    else:
        types = {"param_dtype": "float32", "reduce_dtype": "float32", "buffer_dtype": "float32"}
        common["router_replay"] = {"mode": case.mode}  # a dict, as from hydra; verl's files lack this section
        settings = FSDPEngineConfig(
            strategy="fsdp2", dtype="float32", mixed_precision=types, use_torch_compile=False, **common
        )
        optimizer = FSDPOptimizerConfig(lr=LEARNING, total_training_steps=10)
    engine = EngineRegistry.new(
        "language_model",
        case.backend,
        model_config=model,
        engine_config=settings,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def gradient_of(engine: Any, case: Case) -> torch.Tensor | None:
    """Return this rank's rows of the embedding's gradient after the update, or None if another rank has them."""
    if case.backend == "fsdp2":
        gradient = engine.module.get_input_embeddings().weight.grad
        return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).cpu()
    module = engine.module[0].module
    embedding = getattr(getattr(module, "module", module), "embedding", None)
    return None if embedding is None else embedding.word_embeddings.weight.main_grad.cpu()


@dataclasses.dataclass(frozen=True)
class Expected:
    """Samples, their experts, and transformers' results: log-probs with these experts and without, and one gradient."""

    samples: list[torch.Tensor]
    experts: list[torch.Tensor]
    wanted: list[torch.Tensor]
    plain: list[torch.Tensor]
    gradient: torch.Tensor


def expected_of(folder: Path, case: Case) -> Expected:
    """Compute the expected results on the host, before verl's engines replace transformers' functions by the NPU's."""
    reference = Reference(folder / case.model)
    generator = torch.Generator().manual_seed(5)
    samples = [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]
    drawn = experts_of(reference.model.config, generator)
    experts = drawn if case.given == "random" else [reference.preferred(each) for each in samples]
    wanted = [reference.log_probs(*each) for each in zip(samples, experts, strict=True)]
    plain = [reference.log_probs(each, None) for each in samples]
    sum(each.sum() for each in (wanted if case.mode == "R3" else plain)).backward()
    gradient = reference.model.get_input_embeddings().weight.grad
    return Expected(samples, experts, [each.detach() for each in wanted], [each.detach() for each in plain], gradient)


def found_of(folder: Path, case: Case, expected: Expected) -> dict[str, Any]:
    """Run the forward and the update of one case on this rank, and return the differences and metrics."""
    engine = engine_of(folder / case.model, case)
    ranks, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    own = range(rank * len(LENGTHS) // ranks, (rank + 1) * len(LENGTHS) // ranks)
    mine = [expected.samples[index] for index in own], [expected.experts[index] for index in own]
    found: dict[str, Any] = {"sources": engine.is_mp_src_rank_with_outputs()}
    if case.reference:
        second = engine_of(folder / case.model, case, trains=False)
        with second.eval_mode():
            logs = log_probs_of(second.infer_batch(batch_of(*mine, case)))
        found["reference"] = furthest(logs, [expected.wanted[index] for index in own])
    with engine.eval_mode():
        output = engine.infer_batch(batch_of(*mine, case))
    with engine.train_mode():
        update = engine.forward_backward_batch(batch_of(*mine, case), loss_of, forward_only=False)
        gradient = gradient_of(engine, case)
    if found["sources"]:
        for name in ("wanted", "plain"):
            found[name] = furthest(log_probs_of(output), [getattr(expected, name)[index] for index in own])
        found["metrics"] = {name: values[0] for name, values in update["metrics"].items()}
    if gradient is not None:
        wanted = expected.gradient
        if case.tensor > 1:
            wanted = wanted.chunk(case.tensor)[parallel_state.get_tensor_model_parallel_rank()]
        found["gradient"] = ((gradient - wanted).abs().max() / wanted.abs().max()).item()
    return found


def log_probs_of(output: dict[str, Any]) -> list[torch.Tensor]:
    """Return each sample's log-probs, in the form of `Reference.log_probs`."""
    return [each[:-1].float().cpu() for each in output["model_output"]["log_probs"].unbind()]


def furthest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest absolute difference between two lists of tensors."""
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


def upstream_found(folder: Path, case: Case, expected: Expected) -> dict[str, Any]:
    """Return the error of verl's own engine, and how many of its routers verl reaches once a second model is built."""
    from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
    from verl.utils.megatron.router_replay_utils import iter_model_routers
    from verl.utils.megatron_utils import unwrap_model

    engine, error = engine_of(folder / case.model, case), ""
    try:
        with engine.eval_mode():
            engine.infer_batch(batch_of(expected.samples, expected.experts, case))
    except RuntimeError as raised:
        error = str(raised)
    RouterReplay.clear_global_router_replay_action()
    engine_of(folder / case.model, case, trains=False)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    routers = [router for chunk in engine.module for _, router in iter_model_routers(unwrap_model(chunk))]
    reached = sum(router.router_replay_action is not None for router in routers)
    RouterReplay.clear_global_router_replay_action()
    return {"error": error, "routers": len(routers), "reached": reached}


class StubRouter(TopKRouter):
    """A router without weights for one layer, to which verl passes the given experts."""

    def __init__(self, layer: int) -> None:
        from verl.utils.megatron.router_replay_patch import RouterReplay

        torch.nn.Module.__init__(self)
        self.layer_number, self.router_replay = layer + 1, RouterReplay()


def placed_as_verl(packed_by: int) -> bool:
    """Return whether packed samples have the rows that verl gives to the routers of one of `packed_by` tensor ranks."""
    from verl.utils.megatron import router_replay_utils as upstream

    from verl_plugin.routing_replay.megatron_engine import RoutedMegatron

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=packed_by)
    generator = torch.Generator().manual_seed(7)
    samples = [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]
    experts = [torch.randint(0, 200, (length, 2, 4), generator=generator, dtype=torch.uint8) for length in LENGTHS]
    batch = batch_of(samples, experts, Case("megatron", "qwen3moe", packed=True)).to("npu")
    engine = object.__new__(RoutedMegatron)
    engine.engine_config = SimpleNamespace(use_remove_padding=True)
    engine.tf_config = SimpleNamespace(sequence_parallel=packed_by > 1, fp8=None, num_layers=2)
    rows = engine._rows(batch)
    routers = torch.nn.ModuleList([StubRouter(layer) for layer in range(2)])
    mask = upstream.build_r3_replay_mask(batch["input_ids"], batch["response_mask"])
    upstream.set_router_replay_data(
        batch["routed_experts"], None, engine.tf_config, 0, replay_mask=mask, model=SimpleNamespace(decoder=routers)
    )
    parallel_state.destroy_model_parallel()
    return all(
        torch.equal(rows.experts[:, layer], router.router_replay.target_topk_idx)
        and torch.equal(rows.known, router.router_replay.target_replay_mask.bool())
        for layer, router in enumerate(routers)
    )


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    cases = (*UPSTREAM[world], *REPLAYED[world], *COMPARED[world])
    expected = {case: expected_of(folder, case) for case in cases}
    found: dict[str, Any] = {}
    for case in cases:  # unextended engines first: extensions apply to the whole process
        found[case.name] = (found_of if case.extended else upstream_found)(folder, case, expected[case])
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
    found["placed as verl"] = placed_as_verl(world)
    (folder / f"{world}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
