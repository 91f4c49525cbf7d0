"""Generates with vLLM and unmodified vllm-ascend, and with transformers, in float32, and says how they compare.

``python -m tests.npu_emulator.vllm_ascend_program FOLDER [all | pairs | NAME ...]`` runs cases one after another: by
default those of `SELECTED`, with `pairs` those of `covering`. It imports everything once and forks the ranks of each
case. Checkpoints and ``found.json``, case -> results, are written to FOLDER; cases that are there and did not fail are
not run again. At the end it says how many cases gave transformers' tokens, both times that they generated.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import time
from itertools import product
from pathlib import Path

from npu_emulator import engine
from tests.float32_exchange import exchange_in_float32
from tests.npu_emulator.vllm_ascend_models import write_checkpoint
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

PROMPTS = 8
TOKENS = 32
CAPTURED_SIZES = (1, 2, 4, 8)  # tokens of a step that runs in ACL graphs
STREAMS = {"enable_multistream_mla": True, "enable_multistream_moe": True}
IMPORTED_ONCE = (
    "torch._dynamo", "torch._inductor.config", "vllm.entrypoints.llm", "vllm.v1.engine.core",
    "vllm_ascend.worker.worker_v1", "vllm_ascend.models.deepseek_v2", "vllm_ascend.models.qwen2",
    "vllm_ascend.models.qwen3", "vllm_ascend.models.qwen3_moe",
    "vllm_ascend.core.scheduler", "vllm_ascend.ops",
)  # fmt: skip
RANKS = {"tp1": 1, "tp2ep": 2, "dp2ep": 2, "tp2": 2, "dp2": 2, "tp16ep": 16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine: a model, how it is spread, how prompts are scheduled, and the graph options if it runs in graphs.

    Mixtures run in torchair graphs, dense models in ACL graphs: in pieces between attention, or "full", where attention
    is in the graph, and is replaced before each replay by one over the lengths of that step.
    """

    model: str
    layout: str
    chunks: bool = False
    prefix_cache: bool = False
    graph: tuple | None = None
    fault: str = ""  # see `disturbed`
    sleeps: bool = False  # between the two times that it generates

    @property
    def name(self) -> str:
        parts = [
            self.model,
            self.layout,
            *(word for word in ("chunks", "prefix_cache", "sleeps") if getattr(self, word)),
        ]
        parts += [] if self.graph is None else ["graph", *(option.split("_")[-1] for option in self.graph)]
        return " ".join([*parts, *([self.fault] if self.fault else [])])


DENSE = ("qwen2", "qwen2.5", "qwen2.5tied")
MIXTURES = ("deepseek8", "deepseek256")
SCHEDULES = list(product((False, True), (False, True)))
EVERYTHING = [
    *(Case(*case) for case in product(DENSE + MIXTURES, ("tp1", "tp2ep", "dp2ep"), (False, True), (False, True))),
    *(Case(*case, graph) for case in product(MIXTURES, ("tp1", "tp2", "dp2"), (False, True), (False, True))
      for graph in ((), tuple(STREAMS))),
    *(Case(*case, ()) for case in product(DENSE, ("tp1", "tp2", "dp2"), (False, True), (False, True))),
    Case("deepseek16heads", "tp16ep"),
    Case("deepseek16heads", "tp16ep", graph=tuple(STREAMS)),
]  # fmt: skip
SELECTED = [
    Case("deepseek256", "tp1", chunks=True, prefix_cache=True),
    Case("deepseek256", "tp1", graph=tuple(STREAMS)),
    Case("deepseek8", "tp1", prefix_cache=True),
    Case("qwen2", "tp1", graph=(), sleeps=True),
    Case("deepseek256", "tp2ep"),
    Case("deepseek8", "tp2", graph=()),
    Case("qwen2.5tied", "tp2ep", chunks=True, prefix_cache=True),
    Case("deepseek8", "dp2ep", chunks=True),
    Case("deepseek256", "dp2", graph=()),
    Case("qwen2.5", "dp2ep"),
    Case("qwen2.5", "tp2", fault="late results"),
    Case("qwen2.5tied", "tp1", prefix_cache=True, graph=()),
    Case("qwen2", "tp2", chunks=True, graph=()),
    Case("qwen3", "tp2", chunks=True),
    Case("qwen3moe", "dp2ep"),
    Case("qwen2", "tp1", graph=("full",)),
]
FAULTY = [
    Case("qwen2.5", "tp1", graph=(), fault="no replay"),
    Case("deepseek8", "tp1", graph=(), fault="no rotation of queries"),
    Case("qwen2.5", "tp2", fault="no wait"),
]
# Graphs whose tasks are replaced.
FULL_GRAPHS = [
    Case("qwen2", "tp1", graph=("full",)),
    Case("qwen2.5", "tp2", graph=("full",)),
    Case("qwen2", "tp1", graph=("full",), fault="no update"),
]
CASES = {case.name: case for case in [*EVERYTHING, *SELECTED, *FAULTY, *FULL_GRAPHS]}


def settings_of(case: Case) -> frozenset:
    """Return the case's value of every setting in which cases differ."""
    layout = case.layout.removesuffix("ep")
    return frozenset(enumerate((case.model, layout, case.chunks, case.prefix_cache, case.graph is not None)))


def chosen_cases(words: list[str]) -> list[Case]:
    if words == ["all"]:
        return EVERYTHING
    if words == ["pairs"]:
        return covering([case for case in EVERYTHING if case.layout != "tp16ep"], settings_of)
    return [CASES[name] for name in words] or [*SELECTED, *FAULTY]


def engine_options(case: Case) -> dict:
    """Return the case as arguments of vllm.LLM.

    Prompts are whole when they fit into a step. Dense models always get them whole, unless requests have priorities.
    """
    options = {"additional_config": {}}
    if case.chunks:
        options |= {"max_num_batched_tokens": 24, "scheduling_policy": "priority"}
    if case.graph is not None and case.model in DENSE:
        options["compilation_config"] = {
            "cudagraph_capture_sizes": list(CAPTURED_SIZES),
            "full_cuda_graph": "full" in case.graph,
        }
    elif case.graph is not None:
        graph = {"enabled": True} | dict.fromkeys(case.graph, True)
        options["additional_config"]["torchair_graph_config"] = graph
    if case.layout.startswith("tp") and RANKS[case.layout] > 1:
        options |= {"tensor_parallel_size": RANKS[case.layout], "distributed_executor_backend": "external_launcher"}
    return options | {
        "enforce_eager": case.graph is None,
        "enable_prefix_caching": case.prefix_cache,
        "enable_sleep_mode": case.sleeps,
        "max_model_len": 256 if case.prefix_cache else 128,
        "enable_expert_parallel": case.layout.endswith("ep") and case.model not in DENSE,
    }


def without_rotation(operator):
    """Return an attention that ignores the rotary part of queries."""

    def corrupt(*args, query_rope, **options):
        return operator(*args, query_rope=query_rope * 0, **options)

    return corrupt


@contextlib.contextmanager
def disturbed(fault: str):
    """Make collectives complete late, as on a real NPU, remove the waits for them, or corrupt an operator."""
    import torch
    import torch.distributed as dist

    if not fault:
        yield
    elif fault == "no replay":
        torch.npu.NPUGraph.replay = lambda graph: None
        yield
    elif fault == "no update":
        keep_tasks()
        yield
    elif fault == "no rotation of queries":
        corrupt_attention()
        yield
    else:
        if fault == "no wait":
            dist.all_reduce = functools.partial(dist.all_reduce, async_op=True)
        with deferred_collectives():
            yield


def keep_tasks() -> None:
    """Let every update of captured tasks leave them as they are; the events that replays wait for are recorded."""
    import torch
    from vllm_ascend.compilation.piecewise_backend import NPUPiecewiseBackend

    def record(backend, graph_params, forward_context, runtime_shape) -> None:
        with torch.npu.stream(backend.update_stream):
            for event in graph_params.events[runtime_shape]:
                event.record(backend.update_stream)

    NPUPiecewiseBackend.update_attn_params = record


def corrupt_attention() -> None:
    """Let the attention of torchair's graphs leave out the rotary part of queries."""
    import torch

    # The runner of the graph's nodes looks operators up by name and calls the overload.
    overload = torch.ops.npu.npu_fused_infer_attention_score.default
    overload._op = without_rotation(overload._op)


@contextlib.contextmanager
def deferred_collectives():
    """Results of collectives appear when they are waited for, until the context ends."""
    library = engine.library()
    before = library.npu_emulator_defer_collectives(1)
    try:
        yield
    finally:
        library.npu_emulator_defer_collectives(before)


@exchange_in_float32()  # 16 ranks decode through MC2, which takes 16 bits alone
def main(folder: Path) -> None:
    """Run one rank of the case that the environment names."""
    from torch._dynamo.utils import counters
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs._is_v1_supported_oracle = lambda self, model_config: True  # float32 is for tests, says vLLM
    case, rank, started = CASES[os.environ["VLLM_ASCEND_CASE"]], int(os.environ["RANK"]), time.monotonic()
    requests = make_prompts(PROMPTS, case.prefix_cache)
    speaks = rank == 0
    if case.layout.startswith("dp"):
        become_data_parallel(rank, RANKS[case.layout])
        requests, speaks = requests[rank :: RANKS[case.layout]], True
    llm = LLM(
        model=str(folder / case.model), skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, seed=0,
        num_gpu_blocks_override=64, gpu_memory_utilization=0.4, swap_space=0, **engine_options(case),
    )  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
    given = [{"prompt_token_ids": request} for request in requests]
    with disturbed(case.fault):
        outputs = llm.generate(given, greedy, use_tqdm=False)
        freed = sleep_and_wake(llm) if case.sleeps else 0
        again = llm.generate(given, greedy, use_tqdm=False)
    if speaks:
        model = AutoModelForCausalLM.from_pretrained(folder / case.model).eval()
        found = compare(model, outputs, requests)
        found["again"] = compare(model, again, requests)["equal"]
        found["wrong prompt"] = compare(model, outputs, [prompt[:-1] + [9] for prompt in requests])["equal"]
        found["cached"] = sum(output.num_cached_tokens for output in again)
        found["freed in sleep"] = freed
        found["graphs"] = counters["stats"]["unique_graphs"]
        found |= counted()
        found["seconds"] = time.monotonic() - started
        (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def merged(parts: list[dict]) -> dict:
    """Merge the results of all ranks that had prompts of their own."""
    total = {key: sum(part[key] for part in parts) for key in ("equal", "of", "again", "wrong prompt", "cached")}
    rest = {key: max(part[key] for part in parts) for key in ("worst", "graphs", "seconds", "freed in sleep")}
    rest |= {key: min(part[key] for part in parts) for key in ("captured", "replayed")}
    return total | rest | {"operators": parts[0]["operators"]}


def is_right(case: Case, results: dict) -> bool:
    """Whether all tokens are transformers' and another prompt gives other tokens; with a fault, whether it shows."""
    if "failed" in results:
        return False
    if case.fault and case.fault != "late results":
        return results["equal"] < results["of"]
    return results["equal"] == results["again"] == results["of"] > results["wrong prompt"]


def run(folder: Path, cases: list[Case]) -> dict:
    found = run_cases(__spec__.name, folder, cases, RANKS, write_checkpoint, merged)
    right = sum(is_right(case, found[case.name]) for case in cases)
    print(f"{right} of {len(cases)} cases are right ({right / len(cases):.1%})")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", metavar="all | pairs | NAME")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        chosen = chosen_cases(options.cases)
    except KeyError as error:
        parser.error(f"there is no case {error}; known are {', '.join(CASES)}")
    os.environ["NPU_EMULATOR_DEVICES"] = str(max(RANKS.values()))
    os.environ |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_MLA_PA": "1"}
    os.environ |= {"VLLM_CACHE_ROOT": str(options.folder / "compiled"), "VLLM_DISABLE_COMPILE_CACHE": "1"}
    # Before a capture torch_npu waits until its watchdogs have counted every collective down. In one of these cases
    # that sometimes never happened: eleven counted as in progress, none in the lists of a rank's watchdogs.
    os.environ["HCCL_ASYNC_ERROR_HANDLING"] = "0"
    import_once(IMPORTED_ONCE)
    run(options.folder, chosen)
