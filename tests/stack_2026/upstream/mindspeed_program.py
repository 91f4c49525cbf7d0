"""Train one step with MindSpeed as verl 0.9's engine starts it, and compare with transformers on the same tokens.

Every rank of a group runs this program, with experts spread over all. The arguments are the tensor parallel size,
whether tokens are permuted by fused operators, as JSON, and the models' folders. The first rank prints the results as
JSON, by model.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

# Import MindSpeed before Megatron-core.
from verl.workers.engine.mindspeed.transformer_impl import _mindspeed_repatch

# isort: split
import mindspeed
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from transformers import AutoModelForCausalLM, PreTrainedModel
from verl.models.mcore.model_forward import gptmodel_forward_model_engine
from verl.utils.megatron.optimizer import get_megatron_optimizer
from verl.workers.config import McoreEngineConfig

import verl_plugin.mindspeed  # noqa: F401

LENGTHS = (12, 5, 20)
NO_CLIPPING = 1e6  # Megatron-core computes the norm of gradients only if it has a limit
# With a large epsilon, Adam's first step is smooth in the gradient, instead of only its sign.
STEP = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


def sequences() -> list[torch.Tensor]:
    """Draw the tokens of the sequences, which verl packs into one."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(9, 500, (length,), generator=generator) for length in LENGTHS]


def loss_of(logits: list[torch.Tensor], tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean loss over all tokens except the last of each sequence."""
    losses = [
        torch.nn.functional.cross_entropy(each[:-1].float(), ids[1:].to(each.device), reduction="sum")
        for each, ids in zip(logits, tokens, strict=True)
    ]
    return torch.stack(losses).sum() / sum(len(ids) - 1 for ids in tokens)


def trained_reference(folder: Path) -> tuple[PreTrainedModel, list[torch.Tensor], float]:
    """Return transformers' model after a step of torch's AdamW, its logits before, and the norm of its gradients."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = sequences()
    logits = [model(input_ids=ids[None]).logits[0] for ids in tokens]
    loss_of(logits, tokens).backward()
    norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
    torch.optim.AdamW(model.parameters(), **STEP).step()  # verl has Megatron-core decay norms and biases too
    return model, [each.detach() for each in logits], norm


def _of_mindspeed(layer: torch.nn.Module) -> bool:
    return type(layer).__module__.startswith("mindspeed.")


def rejection_of_overlap(folder: Path) -> str:
    """Return why the bridge does not let DeepSeek-V3's shared experts overlap; empty if it does."""
    try:
        AutoBridge.from_pretrained(str(folder)).set_extra_args(moe_shared_expert_overlap=True)
    except ValueError as error:
        return str(error)
    return ""


def compare(folder: Path, **options: Any) -> dict[str, Any]:
    """Return how far logits, norm of gradients and updated weights are from transformers', and MindSpeed's layers.

    Args:
        folder: of the model.
        options: of Megatron-core's configuration.
    """
    reference, expected, expected_norm = trained_reference(folder)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    bridge = AutoBridge.from_pretrained(str(folder), dtype=torch.float32)
    bridge.set_extra_args(moe_router_bias_update_rate=0.0, **options)  # as in the job of DeepSeek-V3
    models = bridge.get_model(bf16=False, wrap_with_ddp=True, data_parallel_random_init=False)
    bridge.load_weights(models, str(folder), memory_efficient=False)
    optimizer = get_megatron_optimizer(
        models,
        OptimizerConfig(
            optimizer="adam", lr=STEP["lr"], adam_eps=STEP["eps"], weight_decay=STEP["weight_decay"],
            adam_beta1=STEP["betas"][0], adam_beta2=STEP["betas"][1], clip_grad=NO_CLIPPING, bf16=False,
            params_dtype=torch.float32, use_distributed_optimizer=True,
        ),
    )  # fmt: skip
    tokens = sequences()
    nested = torch.nested.as_nested_tensor([ids.npu() for ids in tokens], layout=torch.jagged)
    cut = gptmodel_forward_model_engine(models[0], nested, {}, data_format="thd").unbind()
    found = [tensor_parallel.gather_from_tensor_model_parallel_region(each) for each in cut]
    logits = max((a.detach().cpu() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    loss_of(found, tokens).backward()
    finalize_model_grads(models)
    succeeded, norm, _ = optimizer.step()
    with torch.no_grad():
        exported = {name: weight.cpu() for name, weight in bridge.export_weights(models)}
    with tempfile.TemporaryDirectory() as scratch:
        reference.save_pretrained(scratch)  # under HF names, one tensor per expert
        wanted = safetensors.torch.load_file(Path(scratch, "model.safetensors"))
    before = safetensors.torch.load_file(folder / "model.safetensors")
    assert exported.keys() == wanted.keys() == before.keys(), exported.keys() ^ wanted.keys()
    return {
        "logits": logits,
        "stepped": succeeded,
        "norm": abs(norm / expected_norm - 1),
        "weights": max((exported[name] - weight).abs().max().item() for name, weight in wanted.items()),
        "moved": max((wanted[name] - weight).abs().max().item() for name, weight in before.items()),
        "layers": sorted({type(each).__module__ for each in models[0].modules() if _of_mindspeed(each)}),
    }


def main(tensor: int, fused: bool, folders: list[str]) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    options = {"moe_permute_fusion": fused}
    _mindspeed_repatch(McoreEngineConfig(override_transformer_config=dict(options)))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=dist.get_world_size(),
        expert_tensor_parallel_size=1,  # as in the jobs
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    results: dict[str, Any] = {Path(folder).name: compare(Path(folder), **options) for folder in folders}
    for folder in folders:
        if (name := Path(folder).name) == "deepseek_v3":
            results[name]["rejection"] = rejection_of_overlap(Path(folder))
    if dist.get_rank() == 0:
        print(json.dumps(results | {"mindspeed": mindspeed.__file__}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
