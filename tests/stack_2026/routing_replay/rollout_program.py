"""Compare the experts that unmodified vLLM 0.23 and vLLM-Ascend 0.23 return with answers to those of transformers.

`main(folder)` runs this rank's case in its own process, and writes the results to `rollout.<rank>.json`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401
import vllm_ascend.worker.worker  # noqa: F401  (before parts of it)
from vllm import LLM, SamplingParams

from tests.stack_2026.routing_replay.reference import Reference
from tests.stack_2026.vllm_ascend.program import CAPTURED_SIZES, keep_float32
from tests.vllm_cases import make_prompts

# One case uses graphs, chunked prompts and a prefix cache; the other uses none of them.
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": CAPTURED_SIZES},
    "max_num_batched_tokens": 24,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3moe", GRAPHS),
    ("deepseek", {"enforce_eager": True, "enable_prefix_caching": False}),
]


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]  # each engine runs alone
    # One on the same die would see the memory that the other releases while it starts.
    os.environ["NPU_EMULATOR_NODE"] += f".{rank}"
    model, options = CASES[rank]
    if model == "deepseek":
        keep_float32()
    llm = LLM(
        model=str(folder / model), skip_tokenizer_init=True, max_num_seqs=8, seed=0, num_gpu_blocks_override=64,
        gpu_memory_utilization=0.4, max_model_len=256, dtype="float32", enable_return_routed_experts=True, **options,
    )  # fmt: skip
    prompts = make_prompts(4, True)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    reference, found = Reference(folder / model), []
    for _ in range(2):  # the second time from the prefix cache, if enabled
        outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.outputs[0]
            returned = torch.from_numpy(answer.routed_experts.copy())
            expected = reference.preferred(torch.tensor([*prompt, *answer.token_ids]))[:-1]
            same = returned.shape == expected.shape and torch.equal(returned.sort(-1).values, expected.sort(-1).values)
            found.append({"same": same, "dtype": str(returned.dtype), "cached": output.num_cached_tokens})
    (folder / f"rollout.{rank}.json").write_text(json.dumps(found))
    os._exit(0)
