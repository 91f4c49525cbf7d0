"""Train a nine-layer DeepSeek-V3 on two dies of one stage with every kind of recomputation; see test_activations.py.

Each rank writes the peak of an update's forward and backward, and the size of weights and gradients, in bytes.
"""

import verl_patches.prelude_patch  # noqa: F401

# isort: split
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import verl.workers.megatron_workers  # noqa: F401
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import AutoConfig
from verl.models.mcore import get_mcore_forward_fn, hf_to_mcore_config, init_mcore_model


def peak_of_an_update(model: Any, hf_config: Any, config: Any, sequences: int, tokens: int) -> int:
    """Return the peak device memory, in bytes, of one micro batch's forward and backward."""
    ids = torch.randint(3, 60, (sequences, tokens), device="npu")
    mask = torch.ones_like(ids, dtype=torch.bool)
    positions = torch.arange(tokens, device="npu").expand(sequences, -1)

    def forward(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
        next(batches)
        run = get_mcore_forward_fn(hf_config)
        return run(model, ids, mask, positions, sequence_parallel=config.sequence_parallel), lambda x: (x.sum(), {})

    model.zero_grad_buffer()
    torch.npu.empty_cache()
    torch.npu.reset_peak_memory_stats()
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter([None]), model=model, num_microbatches=1, seq_length=1,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return torch.npu.max_memory_allocated()


def main(folder: Path) -> None:
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("hccl")
    request = json.loads((folder / "request.json").read_text())
    hf_config = AutoConfig.from_pretrained(folder)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    config = hf_to_mcore_config(hf_config, torch.float32)
    module = init_mcore_model(config, hf_config, True, True).npu()
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    model = DistributedDataParallel(config=config, module=module, ddp_config=wrapping)
    config.finalize_model_grads_func = partial(finalize_model_grads)
    found: dict[str, int] = {"state": torch.npu.memory_allocated()}
    measure = partial(peak_of_an_update, model, hf_config, config, request["sequences"], request["tokens"])
    for name, recomputation in request["variants"].items():
        for field, value in recomputation.items():
            setattr(config, field, value)
        measure()
        found[name] = measure()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
