"""Generates with unmodified vLLM 0.23 and vLLM-Ascend 0.23, and says how its tokens compare with transformers'.

``python -m tests.stack_2026.vllm_ascend.program FOLDER [all | NAME ...]`` runs cases one after another: by default
those of `SELECTED`. It imports everything once and forks the ranks of each case. Checkpoints and ``found.json``, the
figures by case, are written to FOLDER; cases that are there and did not fail are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tests.ranks import fork_ranks
from tests.stack_2026.vllm_ascend.models import MIXTURES, MODELS, write_checkpoint

PROMPTS = [[1, 3, 10 + number, 40 + 3 * number, 17, *range(4, 4 + 5 * number)] for number in range(6)]
TOKENS = 16
SHARED_START = list(range(20, 40))
CACHED_START = list(range(20, 155))  # more than one block of the cache, which has 128 tokens
CAPTURED_SIZES = [1, 2, 4, 8]  # tokens of a step that runs in graphs
IMPORTED_ONCE = (
    "torch._dynamo", "torch._inductor.config", "vllm.entrypoints.llm", "vllm.v1.engine.core",
    "vllm_ascend.worker.worker", "vllm_ascend.core.recompute_scheduler", "vllm_ascend.ops",
    "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3", "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
)  # fmt: skip
RANKS = {"tp1": 1, "tp2": 2, "tp2ep": 2, "dp2ep": 2}
GRAPHS = ("eager", "PIECEWISE", "FULL_AND_PIECEWISE")


@dataclasses.dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        model: of `MODELS`.
        layout: how it is spread over dies; `ep` spreads the experts of a mixture, or gives dense models none.
        graph: "eager", or vLLM's cudagraph_mode.
        chunks: prompts are computed in steps of at most 24 tokens.
        prefix_cache: prompts begin alike, and what they share is computed once.
        sleeps: between the two times that it generates.
        dtype: of weights and activations.
        fault: what is wrong in this run, see `disturbed`: its tokens must differ.
    """

    model: str
    layout: str = "tp1"
    graph: str = "eager"
    chunks: bool = False
    prefix_cache: bool = False
    sleeps: bool = False
    dtype: str = "float32"
    fault: str = ""

    @property
    def name(self) -> str:
        words = [word for word in ("chunks", "prefix_cache", "sleeps") if getattr(self, word)]
        words += [self.dtype] if self.dtype != "float32" else []
        return " ".join([self.model, self.layout, self.graph, *words, *([self.fault] if self.fault else [])])


def type_of(model: str, reads_cache: bool) -> str:
    """The type in which vLLM-Ascend computes the prompts of a model, of which the cache may hold the beginning.

    DeepSeek's queries are made bfloat16 there, and keys from the cache are left as they are (attention/mla_v1.py).
    """
    return "bfloat16" if model == "deepseek" and reads_cache else "float32"


EVERYTHING = [
    Case(model, layout, graph, chunks, prefix_cache, dtype=type_of(model, chunks or prefix_cache))
    for model, layout, graph, chunks, prefix_cache in product(
        MODELS, ("tp1", "tp2ep", "dp2ep"), GRAPHS, (False, True), (False, True)
    )
]
SELECTED = [
    Case("qwen2.5", graph="FULL_AND_PIECEWISE", prefix_cache=True),
    Case("qwen3"),
    Case("qwen3", graph="PIECEWISE", chunks=True),
    Case("qwen3", graph="FULL_AND_PIECEWISE", sleeps=True),
    Case("qwen3", "tp2", "FULL_AND_PIECEWISE"),
    Case("qwen3moe", graph="FULL_AND_PIECEWISE", chunks=True, prefix_cache=True),
    Case("qwen3moe", "dp2ep"),
    Case("qwen3moe", "tp2ep", "PIECEWISE"),
    Case("deepseek"),
    Case("deepseek", graph="FULL_AND_PIECEWISE"),
    Case("deepseek", "tp2ep", "PIECEWISE", chunks=True, dtype="bfloat16"),
    Case("deepseek", "tp2ep"),
    Case("qwen3", graph="FULL_AND_PIECEWISE", dtype="bfloat16"),
    Case("deepseek", graph="FULL_AND_PIECEWISE", dtype="bfloat16"),
]
FAULTY = [
    Case("qwen3", graph="FULL_AND_PIECEWISE", fault="no update"),
    Case("qwen3", graph="PIECEWISE", fault="no replay"),
]
CASES = {case.name: case for case in [*EVERYTHING, *SELECTED, *FAULTY]}


def engine_options(case: Case) -> dict[str, Any]:
    """What the case means as arguments of vllm.LLM."""
    options: dict[str, Any] = {"enforce_eager": case.graph == "eager"}
    if case.graph != "eager":
        options["compilation_config"] = {"cudagraph_mode": case.graph, "cudagraph_capture_sizes": CAPTURED_SIZES}
    if case.sleeps:  # vLLM-Ascend refuses to wake with weights in tiles
        options["additional_config"] = {"weight_nz_mode": 0}
    if case.chunks:
        options |= {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    if case.layout.startswith("tp") and RANKS[case.layout] > 1:
        options |= {"tensor_parallel_size": RANKS[case.layout], "distributed_executor_backend": "external_launcher"}
    return options | {
        "enable_prefix_caching": case.prefix_cache,
        "enable_sleep_mode": case.sleeps,
        "max_model_len": 256,
        "enable_expert_parallel": case.layout.endswith("ep") and case.model in MIXTURES,
        "dtype": case.dtype,
    }


@contextlib.contextmanager
def disturbed(fault: str) -> Iterator[None]:
    """Let replays of graphs, or updates of the attention in them, do nothing."""
    import torch

    if fault == "no replay":
        torch.npu.NPUGraph.replay = lambda graph: None
    elif fault == "no update":
        keep_tasks()
    yield


def keep_tasks() -> None:
    """Let every update of captured tasks leave them as they are; the events that replays wait for are recorded."""
    import torch
    from vllm_ascend.compilation.acl_graph import get_graph_params
    from vllm_ascend.worker import model_runner_v1

    def record(backend: Any, stream: Any, context: Any, num_tokens: int, *rest: Any) -> None:
        with torch.npu.stream(stream):
            for event in get_graph_params().events[num_tokens]:
                event.record(stream)

    model_runner_v1.update_full_graph_params = record


def become_data_parallel(rank: int, size: int) -> None:
    """Say in the environment what vLLM wants to know, and forget what it would mistake for tensor parallelism.

    The ranks are machines of their own: vLLM gives each the first die that it sees.
    """
    settings = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": size, "MASTER_IP": "127.0.0.1"}
    os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in settings.items()}
    os.environ["VLLM_DP_MASTER_PORT"] = os.environ["MASTER_PORT"]
    os.environ["NPU_EMULATOR_NODE"] += f".{rank}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def compare(model: Any, outputs: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Count tokens that transformers would have chosen too, from what was generated before them.

    Returns:
        `equal`, `of`: tokens; `close`: those equal or, by transformers, at most 0.05 less probable (in the logarithm)
        than the best, as rounding to 16 bits may exchange them; `worst`: largest difference of log-probs.
    """
    import torch

    equal, close, worst = 0, 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        with torch.no_grad():
            expected = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().log_softmax(-1)
        expected = expected[len(prompt) - 1 : -1]
        for row, token, found in zip(expected, tokens, output.outputs[0].logprobs, strict=True):
            equal += int(row.argmax()) == token
            close += bool(row[token] >= row.max() - 0.05)
            worst = max(worst, abs(row[token].item() - found[token].logprob))
    return {"equal": equal, "close": close, "of": len(prompts) * TOKENS, "worst": worst}


def counted() -> dict[str, Any]:
    """Graphs captured and replayed, and calls by operator of CANN or ATB."""
    from npu_emulator import meters

    snapshot = meters.snapshot()
    calls = {name: numbers["calls"] for name, numbers in snapshot["operators"].items()}
    return {what: snapshot["graphs"][what] for what in ("captured", "replayed")} | {"operators": calls}


def sleep_and_wake(llm: Any) -> int:
    """Put the engine to sleep, its weights kept on the host, and wake it. The bytes that were free meanwhile."""
    import torch

    before = torch.npu.mem_get_info()[0]
    llm.sleep(level=1)
    asleep = torch.npu.mem_get_info()[0]
    llm.wake_up()
    return int(asleep - before)


def sampled(llm: Any, requests: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether sampling with a seed gives the same tokens again, and with another seed others."""
    from vllm import SamplingParams

    def tokens(seed: int) -> list[list[int]]:
        given = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=seed)
        return [list(output.outputs[0].token_ids) for output in llm.generate(requests, given, use_tqdm=False)]

    first = tokens(1)
    return {"same seed": tokens(1) == first, "other seed": tokens(2) != first}


def main(folder: Path) -> None:
    """Run one rank of the case that the environment names."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams

    case, rank, started = CASES[os.environ["VLLM_ASCEND_CASE"]], int(os.environ["RANK"]), time.monotonic()
    prompts = [(CACHED_START if case.prefix_cache else SHARED_START) + prompt for prompt in PROMPTS]
    speaks = rank == 0
    if case.layout.startswith("dp"):
        become_data_parallel(rank, RANKS[case.layout])
        prompts, speaks = prompts[rank :: RANKS[case.layout]], True
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
    if speaks:
        model = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype="float32").eval()
        found |= compare(model, outputs, prompts)
        repeated = compare(model, again, prompts)
        found |= {"again": repeated["equal"], "again close": repeated["close"], "freed in sleep": freed}
        found["wrong prompt"] = compare(model, outputs, [prompt[:-1] + [9] for prompt in prompts])["equal"]
        found["seconds"] = time.monotonic() - started
        (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of all ranks that had prompts of their own."""
    sums = ("equal", "close", "of", "again", "again close", "wrong prompt", "cached")
    total = {key: sum(part[key] for part in parts) for key in sums}
    total |= {key: max(part[key] for part in parts) for key in ("worst", "seconds", "freed in sleep")}
    total |= {key: min(part[key] for part in parts) for key in ("captured", "replayed", "same seed", "other seed")}
    return total | {"operators": parts[0]["operators"]}


def import_once() -> None:
    """Import what every engine imports, in the order in which vLLM does it; no device is touched.

    vLLM looks at the class of a model in a process of its own, lest a device be touched; here it may do so in this one.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    current_platform.pre_register_and_update()
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
        lazy.load_model_cls()
    )


def is_right(case: Case, figures: dict[str, Any]) -> bool:
    """Whether all tokens are transformers' and another prompt gives others; with a fault, whether it shows."""
    if "failed" in figures:
        return False
    if case.fault:
        return bool(figures["equal"] < figures["of"])
    equal = ("equal", "again") if case.dtype == "float32" else ("close", "again close")
    return all(figures[key] == figures["of"] for key in equal) and figures["wrong prompt"] < figures["of"]


def run(folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    file = folder / "found.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    waiting = [case for case in cases if "failed" in found.get(case.name, {"failed": "never run"})]
    for model in {case.model for case in waiting}:
        write_checkpoint(model, folder / model)
    for case in waiting:
        os.environ |= {"VLLM_ASCEND_CASE": case.name, "NPU_EMULATOR_NODE": f"vllm_ascend.{os.getpid()}.{len(found)}"}
        failed = fork_ranks(__spec__.name, RANKS[case.layout], folder)
        parts = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case.name}.*.json"))]
        found[case.name] = {"failed": failed} if failed or not parts else merged(parts)
        shown = {key: value for key, value in found[case.name].items() if key != "operators"}
        print(f"{case.name:55} {shown}", flush=True)
        file.write_text(json.dumps(found))
    right = sum(is_right(case, found[case.name]) for case in cases)
    print(f"{right} of {len(cases)} cases are right")
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
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["VLLM_CACHE_ROOT"] = str(options.folder / "compiled")
    import_once()
    chosen = EVERYTHING if options.cases == ["all"] else [CASES[name] for name in options.cases]
    run(options.folder, chosen or [*SELECTED, *FAULTY])
