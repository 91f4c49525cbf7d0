"""Generate from images with unmodified vLLM 0.23 and vLLM-Ascend 0.23.

Compares the tokens with transformers'. Cases run as those of `program`; by
default all of them:

    python -m tests.stack_2026.vllm_ascend.images_program FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from math import prod
from pathlib import Path
from typing import Any

from tests.npu_emulator.vision_language_program import TOKENS, ask, compare, draw_images, write_checkpoint
from tests.stack_2026.vllm_ascend.program import CAPTURED_SIZES
from tests.vllm_cases import counted, import_once, run_cases, sleep_and_wake

IMPORTED_ONCE = (
    "torch._dynamo", "torch._inductor.config", "vllm.entrypoints.llm", "vllm.v1.engine.core",
    "vllm_ascend.worker.worker", "vllm_ascend.core.recompute_scheduler", "vllm_ascend.ops",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen2_5_vl",
)  # fmt: skip
RANKS = {"tp1": 1, "tp2": 2}
# WIDE has heads of the published width, for which vLLM-Ascend calls another kernel for three-part positions (M-RoPE).
TINY, WIDE = "qwen2.5vl", "qwen2.5vl-wide"
PROMPTS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine in float32; attributes as in `program.Case`."""

    model: str = TINY
    layout: str = "tp1"
    graph: str = "eager"
    chunks: bool = False
    sleeps: bool = False

    @property
    def name(self) -> str:
        words = [word for word in ("chunks", "sleeps") if getattr(self, word)]
        return " ".join([self.model, self.layout, self.graph, *words])


CASES = {
    case.name: case
    for case in (
        Case(),
        Case(layout="tp2"),
        Case(WIDE),
        Case(WIDE, "tp2", "FULL_AND_PIECEWISE", chunks=True),
        Case(graph="PIECEWISE", sleeps=True),
    )
}


def engine_options(case: Case) -> dict[str, Any]:
    """Return the case's arguments of vllm.LLM."""
    options: dict[str, Any] = {"enforce_eager": case.graph == "eager"}
    if case.graph != "eager":
        options["compilation_config"] = {"cudagraph_mode": case.graph, "cudagraph_capture_sizes": CAPTURED_SIZES}
    if case.sleeps:  # vLLM-Ascend cannot wake with tiled weights
        options["additional_config"] = {"weight_nz_mode": 0}
    if case.chunks:
        options |= {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    if RANKS[case.layout] > 1:
        options |= {"tensor_parallel_size": RANKS[case.layout], "distributed_executor_backend": "external_launcher"}
    return options | {
        "enable_prefix_caching": False,
        "enable_sleep_mode": case.sleeps,
        "max_model_len": 128,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
    }


def write_model(name: str, folder: Path) -> None:
    """Write a random model with its processor. The wide model's file is transformers 5's, not as published."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    write_checkpoint(folder)
    if name == TINY:
        return
    described = json.loads((folder / "config.json").read_text())
    described |= {"hidden_size": 512, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    described["vision_config"]["out_hidden_size"] = 512
    (folder / "config.json").write_text(json.dumps(described))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).float()
    for parameter_name, parameter in model.named_parameters():
        mean = 1.0 if parameter_name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")) else 0.0
        torch.nn.init.normal_(parameter, mean, 0.1 if parameter.dim() == 1 else parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)


def weights_of(model: Any, served: Any, ranks: int, rank: int) -> dict[str, Any]:
    """Compare this rank's weights with the file's, in the layout that alltoallv transfers.

    Returns:
        `differing`: names of weights with other bytes. `unplaced`: names that the layout lacks. `elements`: how many
        more elements the layout has than the rank.
    """
    import torch

    from post_training.layouts.layout import RolloutPlacement
    from post_training.layouts.published_names import published_name
    from post_training.models.families import table_for
    from verl_plugin.alltoallv.rollout_layout import fitted, served_weights

    table, weights = table_for(model.config), served_weights(served)
    files = {published_name(name): tensor for name, tensor in model.state_dict().items()}
    shards = fitted(table.vllm_ascend(RolloutPlacement(tp=ranks), rank), weights)
    wrong = [
        shard.hf_name
        for shard in shards
        if shard.hf_name
        and not torch.equal(
            shard.locate(weights).cpu(), files[shard.hf_name][tuple(slice(*edge) for edge in shard.bounds)]
        )
    ]
    placed = sum(prod(shard.extents) for shard in shards)
    return {
        "differing": wrong,
        "unplaced": sorted(files.keys() - {shard.hf_name for shard in shards}),
        "elements": placed - sum(tensor.numel() for tensor in weights.values()),
    }


def flat_positions(tokens: Any) -> Any:
    """Return positions as for text, [3, 1, tokens]; an image's patches would have rows and columns."""
    import torch

    return torch.arange(tokens.shape[1]).expand(3, 1, -1)


def main(folder: Path) -> None:
    """Run one rank of the case that the environment names; results, or the error, go to `folder`."""
    case, rank = CASES[os.environ["VLLM_ASCEND_CASE"]], int(os.environ["RANK"])
    try:
        results = generate(folder, case, rank)
    except Exception as error:
        (folder / f"{case.name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / f"{case.name}.{rank}.json").write_text(json.dumps(results))
    os._exit(0)


def generate(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """Generate twice. The first rank compares with transformers, and each rank its weights with the file's."""
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm = LLM(
        model=str(folder / case.model), max_num_seqs=8, seed=0, num_gpu_blocks_override=64, dtype="float32",
        gpu_memory_utilization=0.4, **engine_options(case),
    )  # fmt: skip
    processor = AutoProcessor.from_pretrained(folder / case.model)
    requests = vllm_requests(processor)
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    outputs = llm.generate(requests, greedy, use_tqdm=False)
    freed = sleep_and_wake(llm) if case.sleeps else 0
    again = llm.generate(requests, greedy, use_tqdm=False)
    found: dict[str, Any] = counted() | {"freed in sleep": freed}
    model = AutoModelForImageTextToText.from_pretrained(folder / case.model, dtype="float32").eval()
    served = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    found |= weights_of(model, served, RANKS[case.layout], rank)
    if rank == 0:
        found |= comparisons(model, processor, outputs, again)
    return found | {"seconds": time.monotonic() - started}


def image_prompts(processor: Any, seed: int = 0) -> list[tuple[str, list[Any]]]:
    """Return the text of each prompt with its images; the seed only changes the images."""
    return [(ask(processor, number, images), images) for number, images in enumerate(draw_images(seed))]


def vllm_requests(processor: Any) -> list[dict[str, Any]]:
    """Return the prompts as verl gives them to vLLM, with one token for each image."""
    return [
        {"prompt_token_ids": processor.tokenizer.encode(text), "multi_modal_data": {"image": images}}
        for text, images in image_prompts(processor)
    ]


def encoded_prompts(processor: Any, seed: int = 0) -> list[Any]:
    """Return the prompts in the form that transformers takes."""
    pairs = image_prompts(processor, seed)
    return [processor(text=[text], images=images, return_tensors="pt") for text, images in pairs]


def comparisons(model: Any, processor: Any, outputs: list[Any], again: list[Any]) -> dict[str, Any]:
    """Compare with transformers on the same images, and on the controls: other images, and text positions."""
    right = encoded_prompts(processor)
    return {
        "first": compare(model, right, outputs),
        "again": compare(model, right, again),
        "other images": compare(model, encoded_prompts(processor, 1), outputs)["worst"],
        "positions of text": compare(model, right, outputs, position_ids=flat_positions)["worst"],
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first rank's results, with the wrong weights of all ranks."""
    wrong = ("differing", "unplaced")
    return parts[0] | {kind: [name for part in parts for name in part[kind]] for kind in wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="NAME", choices=[[], *CASES])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    os.environ["NPU_EMULATOR_DEVICES"] = str(max(RANKS.values()))
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # rehearsals set it; piecewise graphs need tracing
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["VLLM_CACHE_ROOT"] = str(options.folder / "compiled")
    import_once(IMPORTED_ONCE)
    run_cases(
        __spec__.name, options.folder, [CASES[name] for name in options.cases or CASES], RANKS,
        write_model, merged,
    )  # fmt: skip
