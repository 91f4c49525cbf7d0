"""Generate with unmodified vLLM 0.23 and vLLM-Ascend 0.23.

Compares the tokens with transformers'. Runs cases one after another, by default
those of `SELECTED`, `FAULTY`, `IMPOSSIBLE` and `MENDED`:

    python -m tests.stack_2026.vllm_ascend.program FOLDER [all | NAME ...]

It imports everything once and forks the ranks of each case. Checkpoints and
``found.json``, the results by case, are written to FOLDER; cases that have a
result there and did not fail are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.stack_2026.vllm_ascend.models import MIXTURES, MODELS, write_checkpoint
from tests.vllm_cases import (
    become_data_parallel,
    compare,
    counted,
    covering,
    import_once,
    make_prompts,
    run_cases,
    sleep_and_wake,
)

PROMPTS = 6
TOKENS = 16
CAPTURED_SIZES = [1, 2, 4, 8]  # batch sizes in tokens that run in graphs
SMALL = 1e-4
BFLOAT16_PROMPTS = 0.02
IMPORTED_ONCE = (
    "torch._dynamo", "torch._inductor.config", "vllm.entrypoints.llm", "vllm.v1.engine.core",
    "vllm_ascend.worker.worker", "vllm_ascend.core.recompute_scheduler", "vllm_ascend.ops",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3", "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
)  # fmt: skip
RANKS = {"tp1": 1, "tp2": 2, "tp2ep": 2, "dp2ep": 2}
WORKER = "verl_plugin.rollout.worker.RolloutWorker"
GRAPHS = ("eager", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        model: Name in `MODELS`.
        layout: Key of `RANKS`; `ep` spreads a mixture's experts over the dies, and has no effect on dense models.
        graph: "eager", or vLLM's cudagraph_mode.
        chunks: Whether prompts are computed in steps of at most 24 tokens.
        prefix_cache: Whether prompts share a prefix, which is computed once.
        sleeps: Whether the engine sleeps between its two generations.
        nz: Whether weights stay in NZ tiles, vLLM-Ascend's default; only for cases that sleep.
        dtype: Dtype of weights and activations.
        exact: Whether MLA keeps float32 in prefill (see `keep_float32`), as a control for rounding.
        fault: Fault planted in this run (see `disturbed`); its tokens must differ.
        mended: Whether the worker is this project's.
    """

    model: str
    layout: str = "tp1"
    graph: str = "eager"
    chunks: bool = False
    prefix_cache: bool = False
    sleeps: bool = False
    nz: bool = False
    dtype: str = "float32"
    exact: bool = False
    fault: str = ""
    mended: bool = False

    @property
    def name(self) -> str:
        words = [word for word in ("chunks", "prefix_cache", "sleeps", "nz", "exact", "mended") if getattr(self, word)]
        words += [self.dtype] if self.dtype != "float32" else []
        return " ".join([self.model, self.layout, self.graph, *words, *([self.fault] if self.fault else [])])


def type_of(model: str, reads_cache: bool) -> str:
    """Return the dtype in which unmodified vLLM-Ascend can compute a model, with or without reading the prefix cache.

    It casts DeepSeek's queries to bfloat16, but not the keys from the cache (attention/mla_v1.py).
    """
    return "bfloat16" if model == "deepseek" and reads_cache else "float32"


SCHEDULES = list(product((False, True), (False, True)))
PLACES = [
    place
    for place in product(MODELS, ("tp1", "tp2ep", "dp2ep"), GRAPHS)
    if place[0] in MIXTURES or place[1] != "dp2ep"  # see IMPOSSIBLE
]
PLANS = [(*place, *schedule) for place, schedule in product(PLACES, SCHEDULES)]
EVERYTHING = [
    *(Case(model, layout, graph, chunks, cache, dtype=type_of(model, chunks or cache))
      for model, layout, graph, chunks, cache in PLANS),
    *(Case(model, layout, graph, chunks, cache, exact=True)
      for model, layout, graph, chunks, cache in PLANS if model == "deepseek"),
    *(Case(model, layout, graph, sleeps=True)
      for model, layout, graph in PLACES if model not in MIXTURES),  # see IMPOSSIBLE
    *(Case(model, layout, graph, dtype="bfloat16") for model, layout, graph in PLACES),
]  # fmt: skip


def settings_of(case: Case) -> frozenset[Any]:
    """Return the case's attributes as a set of (name, value) pairs."""
    return frozenset(dataclasses.asdict(case).items())


SELECTED = covering(EVERYTHING, settings_of)  # few cases, which cover each pair of settings
IMPOSSIBLE = {
    Case("qwen3", "dp2ep"): "Offline data parallel mode is not supported/useful for dense models",
    Case("qwen3", sleeps=True, nz=True): "FRACTAL_NZ mode is enabled",
    # Waking transposes experts' weights as if they had just been loaded (vllm-ascend#11548).
    Case("qwen3moe", sleeps=True): "mat1 and mat2 shapes cannot be multiplied",
    Case("deepseek", "tp2ep", sleeps=True, exact=True): "mat1 and mat2 shapes cannot be multiplied",
}
# Cases that upstream computes wrongly, and why. When experts are combined, each expert of another rank reads row 1 of
# the experts' outputs with weight 0, as device/device_op.py takes the absolute value of the index -1. If that row is
# not finite, every token becomes non-finite.
WRONG = {
    Case("qwen3moe", "dp2ep", "PIECEWISE", chunks=True, prefix_cache=True): "a graph's padded row is not finite",
    Case("deepseek", "dp2ep", "FULL_AND_PIECEWISE", chunks=True, exact=True): "a row of the idle rank is not finite",
    Case("deepseek", "dp2ep", "FULL_DECODE_ONLY", chunks=True, exact=True): "a row of the idle rank is not finite",
    # The log-prob is right, but transformers' best token is over 0.3 above; 96 of 96 with the prefix cached.
    Case("deepseek", "tp2ep", chunks=True, prefix_cache=True, dtype="bfloat16"): "one token of 96, cause not known",
}
MENDED = {case: dataclasses.replace(case, mended=True) for case in WRONG if case.layout == "dp2ep"}
LOST = next(iter(MENDED))  # the control that runs by default
FAULTY = [
    Case("qwen3", graph="FULL_AND_PIECEWISE", fault="no update"),
    Case("qwen3", graph="PIECEWISE", fault="no replay"),
]
CASES = {case.name: case for case in [*EVERYTHING, *FAULTY, *IMPOSSIBLE, *MENDED.values()]}


def engine_options(case: Case) -> dict[str, Any]:
    """Return the case's arguments of vllm.LLM."""
    options: dict[str, Any] = {"enforce_eager": case.graph == "eager"}
    if case.graph != "eager":
        options["compilation_config"] = {"cudagraph_mode": case.graph, "cudagraph_capture_sizes": CAPTURED_SIZES}
    if case.sleeps and not case.nz:  # vLLM-Ascend cannot wake with tiled weights
        options["additional_config"] = {"weight_nz_mode": 0}
    if case.chunks:
        options |= {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    if case.layout.startswith("dp"):
        # With steps scheduled ahead, an engine in its caller's process gets out of step with ranks whose schedules
        # differ: one asks whether all have finished while another waits for it in a step.
        options |= {"async_scheduling": False}
        if case.graph != "eager":  # each process counts the graphs that it runs
            options |= {"distributed_executor_backend": "uni"}
    if case.layout.startswith("tp") and RANKS[case.layout] > 1:
        options |= {"tensor_parallel_size": RANKS[case.layout], "distributed_executor_backend": "external_launcher"}
    if case.mended:
        options |= {"worker_cls": WORKER}
    return options | {
        "enable_prefix_caching": case.prefix_cache,
        "enable_sleep_mode": case.sleeps,
        "max_model_len": 256,
        "enable_expert_parallel": case.layout.endswith("ep") and case.model in MIXTURES,
        "dtype": case.dtype,
    }


@contextlib.contextmanager
def disturbed(fault: str) -> Iterator[None]:
    """Make graph replays, or updates of the attention in graphs, do nothing."""
    import torch

    if fault == "no replay":
        torch.npu.NPUGraph.replay = lambda graph: None
    elif fault == "no update":
        keep_tasks()
    yield


def keep_tasks() -> None:
    """Make updates of captured tasks do nothing except record the events that replays wait for."""
    import torch
    from vllm_ascend.compilation.acl_graph import get_graph_params
    from vllm_ascend.worker import model_runner_v1

    def record(backend: Any, stream: Any, context: Any, num_tokens: int, *rest: Any) -> None:
        with torch.npu.stream(stream):
            for event in get_graph_params().events[num_tokens]:
                event.record(stream)

    model_runner_v1.update_full_graph_params = record


class Float32Torch:
    """torch, with `bfloat16` replaced by float32."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return torch.float32 if name == "bfloat16" else getattr(torch, name)


def keep_float32() -> None:
    """Make vLLM-Ascend's MLA compute prompts in float32 instead of casting them to bfloat16.

    The emulated kernel accepts float32, which CANN's does not. Everything else that runs is upstream's.
    """
    from vllm_ascend.attention import mla_v1

    mla_v1.torch = Float32Torch()


def sampled(llm: Any, requests: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether sampling repeats its tokens with the same seed, and changes them with another seed."""
    from vllm import SamplingParams

    def tokens(seed: int) -> list[list[int]]:
        given = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=seed)
        return [list(output.outputs[0].token_ids) for output in llm.generate(requests, given, use_tqdm=False)]

    first = tokens(1)
    return {"same seed": tokens(1) == first, "other seed": tokens(2) != first}


def main(folder: Path) -> None:
    """Run one rank of the case that the environment names; results, or the error, go to `folder`."""
    case, rank = CASES[os.environ["VLLM_ASCEND_CASE"]], int(os.environ["RANK"])
    try:
        results = generate(folder, case, rank)
    except Exception as error:
        (folder / f"{case.name}.{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    if results:
        (folder / f"{case.name}.{rank}.json").write_text(json.dumps(results))
    os._exit(0)


def generate(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """Generate twice, and compare with transformers. Return {} if this rank shares its prompts and is not the first."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    prompts = make_prompts(PROMPTS, case.prefix_cache)
    speaks = rank == 0
    if case.layout.startswith("dp"):
        become_data_parallel(rank, RANKS[case.layout])
        prompts, speaks = prompts[rank :: RANKS[case.layout]], True
    if case.exact:
        keep_float32()
    llm = LLM(
        model=str(folder / case.model), skip_tokenizer_init=True, max_num_seqs=8, seed=0, num_gpu_blocks_override=64,
        gpu_memory_utilization=0.4, **engine_options(case),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with disturbed(case.fault):
        outputs = llm.generate(requests, greedy, use_tqdm=False)
        freed = sleep_and_wake(llm) if case.sleeps else 0
        again = llm.generate(requests, greedy, use_tqdm=False)
    found: dict[str, Any] = counted() | {"cached": sum(output.num_cached_tokens for output in again)}
    found |= sampled(llm, requests)
    if not speaks:
        return {}
    model, rounded = (
        AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=dtype).eval()
        for dtype in ("float32", case.dtype)
    )
    found |= compare(model, outputs, prompts, rounded)
    repeated = compare(model, again, prompts, rounded)
    found |= {"again": repeated["equal"], "again close": repeated["close"], "freed in sleep": freed}
    found["wrong prompt"] = compare(model, outputs, [prompt[:-1] + [9] for prompt in prompts])["equal"]
    return found | {"seconds": time.monotonic() - started}


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the results of all ranks that had prompts of their own."""
    sums = ("equal", "close", "of", "again", "again close", "wrong prompt", "cached")
    total = {key: sum(part[key] for part in parts) for key in sums}
    total |= {key: max(part[key] for part in parts) for key in ("worst", "rounding", "seconds", "freed in sleep")}
    total |= {key: min(part[key] for part in parts) for key in ("captured", "replayed", "same seed", "other seed")}
    return total | {"operators": parts[0]["operators"]}


def tolerance(case: Case, results: dict[str, Any]) -> float:
    """Return the largest allowed difference of log-probs to transformers' in float32.

    In 16 bits it is twice transformers' own rounding in that dtype. In float32 it is `SMALL`, except for DeepSeek,
    whose prompts vLLM-Ascend computes in bfloat16.
    """
    if case.dtype != "float32":
        return 2 * float(results["rounding"])
    return BFLOAT16_PROMPTS if case.model == "deepseek" and not case.exact else SMALL


def is_right(case: Case, results: dict[str, Any]) -> bool:
    """Return whether all tokens equal transformers' and another prompt's differ; with a fault, whether it shows.

    An impossible case is right if upstream rejects it with the listed reason.
    """
    if case in IMPOSSIBLE:
        return any(IMPOSSIBLE[case] in reason for reason in results.get("reasons", []))
    if "failed" in results:
        return False
    if case.fault:
        return bool(results["equal"] < results["of"])
    kinds = ("equal", "again") if case.dtype == "float32" else ("close", "again close")
    chosen = all(results[kind] == results["of"] for kind in kinds) and results["wrong prompt"] < results["of"]
    return chosen and bool(results["worst"] <= tolerance(case, results))


def run(folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    found = run_cases(__spec__.name, folder, cases, RANKS, write_checkpoint, merged)
    wrong = [case.name for case in cases if not is_right(case, found[case.name])]
    print(f"{len(cases) - len(wrong)} of {len(cases)} cases are right" + "".join(f"\n  not {name}" for name in wrong))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="all | NAME")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    unknown = [name for name in options.cases if name not in CASES and options.cases != ["all"]]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; known are {', '.join(CASES)}")
    os.environ["NPU_EMULATOR_DEVICES"] = str(max(RANKS.values()))
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # rehearsals set it; piecewise graphs need tracing
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["VLLM_CACHE_ROOT"] = str(options.folder / "compiled")
    import_once(IMPORTED_ONCE)
    chosen = EVERYTHING if options.cases == ["all"] else [CASES[name] for name in options.cases]
    run(options.folder, chosen or [*SELECTED, *FAULTY, *IMPOSSIBLE, *MENDED.values(), LOST])
