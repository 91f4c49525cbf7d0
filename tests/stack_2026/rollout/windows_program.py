"""Run two data-parallel vLLM engines, with experts spread over both, with and without sync windows.

Engines run in the loop of vLLM's DPEngineCoreProc, in which each iteration is one forward, but without its processes,
so that requests arrive at the same iteration in every run. `main` runs one rank of the case that the environment names;
it writes the generated tokens and the number of all-reduces on the host.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.ranks import fork_ranks
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from tests.stack_2026.vllm_ascend.program import CAPTURED_SIZES, IMPORTED_ONCE, WORKER, keep_float32
from tests.vllm_cases import become_data_parallel, import_once, make_prompts
from verl_plugin.rollout.sync_window import SyncWindowError

ENGINES = 2
# Length of each answer, and the iteration at which its request arrives, by engine. The first engine runs four requests
# at a time; the second one is idle for a while.
REQUESTS = [[(4, 0), (9, 0), (70, 0), (25, 0), (30, 0), (12, 0)], [(5, 0), (20, 11)]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        model: Name in `tests.stack_2026.vllm_ascend.models.MODELS`.
        graph: "eager", or vLLM's cudagraph_mode.
        forwards: Length of the longest window in forwards; 0 for upstream's executor.
        fault: "admits": the first engine admits requests within a window; "few": engines agree on one token less.
    """

    model: str
    graph: str = "eager"
    forwards: int = 0
    fault: str = ""

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in dataclasses.astuple(self))


def main(folder: Path) -> None:
    """Run one rank."""
    case, rank = Case(**json.loads(os.environ["WINDOWS_CASE"])), int(os.environ["RANK"])
    become_data_parallel(rank, ENGINES)
    try:
        found = generate(folder, case, rank)
    except SyncWindowError as error:
        found = {"error": str(error), "type": type(error).__name__}
    (folder / f"{case.name}.{rank}.json").write_text(json.dumps(found))
    os._exit("error" in found)  # the other rank waits for this one, and is killed


def engine_of(folder: Path, case: Case) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": case.graph == "eager", "distributed_executor_backend": "uni"}
    if case.graph != "eager":
        options["compilation_config"] = {"cudagraph_mode": case.graph, "cudagraph_capture_sizes": CAPTURED_SIZES}
    if case.forwards:
        options["distributed_executor_backend"] = "verl_plugin.rollout.executor.WindowedInProcess"
        options["additional_config"] = {"sync_windows": {"forwards": case.forwards}}
    return LLM(
        model=str(folder / case.model), skip_tokenizer_init=True, max_num_seqs=4, seed=0, num_gpu_blocks_override=64,
        gpu_memory_utilization=0.4, max_model_len=256, enable_expert_parallel=True, async_scheduling=False,
        enable_prefix_caching=False, dtype="float32", worker_cls=WORKER, **options,
    ).llm_engine  # fmt: skip


def generate(folder: Path, case: Case, rank: int) -> dict[str, Any]:
    """Generate, and count all-reduces on the host: those of workers as `asked`, those of windows as `agreed`."""
    keep_float32()  # DeepSeek's prefill attention, which vLLM-Ascend computes in bfloat16
    engine = engine_of(folder, case)
    core = engine.engine_core.engine_core
    counts = count_all_reduces()
    plant(case.fault, core, rank)
    prompts = make_prompts(len(REQUESTS[0]) + len(REQUESTS[1]), prefix_cache=False)[rank * len(REQUESTS[0]) :]
    outputs: dict[str, Any] = {}
    iteration = 0
    while True:
        arriving = [number for number, (_, at) in enumerate(REQUESTS[rank]) if at == iteration]
        for number in arriving:
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, sampling(REQUESTS[rank][number][0]))
        late = any(at > iteration for _, at in REQUESTS[rank])
        if not engine.has_unfinished_requests_dp(bool(late or engine.output_processor.has_unfinished_requests())):
            break
        engine.should_execute_dummy_batch = False
        made = counts["forwards"]
        if core.scheduler.has_requests():
            outputs |= {each.request_id: each.outputs[0] for each in engine.step() if each.finished}
        if counts["forwards"] == made:
            core.execute_dummy_batch()
        iteration += 1
    return {
        "counts": counts,
        "iterations": iteration,
        "tokens": [list(outputs[str(number)].token_ids) for number in range(len(outputs))],
        "log-probs": [
            [row[token].logprob for row, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in (outputs[str(number)] for number in range(len(outputs)))
        ],
    }


def sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=1, detokenize=False)


def count_all_reduces() -> Counter[str]:
    """Count this process's all-reduces on the host, by caller, and the model's forwards."""
    import torch.distributed as dist
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    counts: Counter[str] = Counter(asked=0, agreed=0, forwards=0)
    all_reduce, forward = dist.all_reduce, NPUModelRunner._model_forward
    makers = {(2, ENGINES): "asked", (5,): "agreed"}

    def counted(tensor: Any, *arguments: Any, **named: Any) -> Any:
        maker = makers.get(tuple(tensor.shape))
        if tensor.device.type == "cpu" and maker:
            counts[maker] += 1
        return all_reduce(tensor, *arguments, **named)

    def counted_forward(*arguments: Any, **named: Any) -> Any:
        counts["forwards"] += 1
        return forward(*arguments, **named)

    dist.all_reduce, NPUModelRunner._model_forward = counted, counted_forward
    return counts


def plant(fault: str, core: Any, rank: int) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    if fault == "admits" and rank == 0:
        core.scheduler.schedule = lambda: Scheduler.schedule(core.scheduler)
    if fault == "few":
        window = core.model_executor.sync_window
        reduce = window._reduce

        def fewer(vector: Any) -> Any:
            tokens, *others = reduce(vector)
            return [max(1, tokens - 1), *others]

        window._reduce = fewer


def run(folder: Path, cases: list[Case]) -> None:
    """Run cases one after another. Exit with an error if a rank failed."""
    import_once(IMPORTED_ONCE)
    for model in {case.model for case in cases}:
        write_checkpoint(model, folder / model)
    for number, case in enumerate(cases):
        os.environ["WINDOWS_CASE"] = json.dumps(dataclasses.asdict(case))
        os.environ["NPU_EMULATOR_NODE"] = f"windows.{os.getpid()}.{number}"
        if fork_ranks(__spec__.name, ENGINES, folder) and not case.fault:
            sys.exit(f"{case.name} failed")


if __name__ == "__main__":
    os.environ["NPU_EMULATOR_DEVICES"] = str(ENGINES)
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.argv[1]) / "compiled")
    run(Path(sys.argv[1]), [Case(**json.loads(argument)) for argument in sys.argv[2:]])
