"""Compare Megatron-core's models, as `verl_plugin.megatron_core` builds them, with transformers and the checkpoint.

Every rank of a group runs this program, and experts are spread over all of them; with `--tensor` the ranks use tensor
and sequence parallelism instead, and with `--whole` both: experts are spread and not cut. The first rank prints the
results as JSON, by model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from mbridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from transformers import AutoModelForCausalLM

import overlay
import verl_plugin.megatron_core  # noqa: F401

TOKENS = 12


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return a Megatron model's logits for one sequence, with the whole vocabulary on each rank."""
    length = ids.shape[1]
    positions = torch.arange(length, device="npu")[None]
    hidden = torch.ones(length, length, dtype=torch.bool, device="npu").triu(1)[None, None]
    logits = model(input_ids=ids.npu(), position_ids=positions, attention_mask=hidden)
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits)


def gradient_differences(bridge: Any, model: Any, reference: Any) -> dict[str, float]:
    """Return the largest difference to transformers' gradients, relative to the largest gradient.

    Covers the embedding and all norms, by transformers' names.
    """
    names = bridge._weight_name_mapping_mcore_local_to_global(model)
    own: dict[str, torch.Tensor] = {}
    for name, parameter in model.module.named_parameters():
        if "norm" in name:
            own[bridge._weight_name_mapping_mcore_to_hf(names[name])[0]] = parameter.main_grad
    own["model.embed_tokens.weight"] = model.module.embedding.word_embeddings.weight.main_grad
    found = {}
    for name, gradient in own.items():
        wanted = reference.get_parameter(name).grad
        if len(gradient) < len(wanted):
            wanted = wanted.chunk(len(wanted) // len(gradient))[parallel_state.get_tensor_model_parallel_rank()]
        found[name] = (gradient.cpu() - wanted).abs().max().item() / wanted.abs().max().item()
    return found


def compare(folder: Path) -> dict[str, float]:
    """Return the largest differences of logits and gradients to transformers', and the number of differing exports."""
    # Megatron-core keeps the attention backend of the previous model in these.
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    bridge = AutoBridge.from_pretrained(str(folder), dtype=torch.float32)
    models = bridge.get_model(bf16=False, wrap_with_ddp=True, data_parallel_random_init=False)
    bridge.load_weights(models, str(folder), memory_efficient=False)
    ids = torch.randint(9, 500, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    found = logits_of(models[0], ids)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = reference(input_ids=ids).logits
    found.logsumexp(-1).mean().backward()
    expected.logsumexp(-1).mean().backward()
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    with torch.no_grad():
        exported = {name: weight.cpu() for name, weight in bridge.export_weights(models)}
    assert stored.keys() == exported.keys(), stored.keys() ^ exported.keys()
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        finalize_model_grads(models)  # sums sequence-parallel gradients; also updates expert biases
    gradients = gradient_differences(bridge, models[0], reference)
    return {
        "logits": (found.cpu() - expected).abs().max().item(),
        "gradient": max(gradients.values()),
        "differ": sum(not torch.equal(exported[name].float(), weight.float()) for name, weight in stored.items()),
    }


def main(folders: list[str], tensor: bool, whole: bool) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world if tensor or whole else 1,
        expert_model_parallel_size=1 if tensor else world,
        expert_tensor_parallel_size=world if tensor else 1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    results = {Path(folder).name: compare(Path(folder)) for folder in folders}
    if dist.get_rank() == 0:
        print(json.dumps(results | {"executed": overlay.executed(), "problems": overlay.report().problems}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    options = [argument for argument in sys.argv[1:] if argument.startswith("--")]
    main(
        [argument for argument in sys.argv[1:] if argument not in options], "--tensor" in options, "--whole" in options
    )
