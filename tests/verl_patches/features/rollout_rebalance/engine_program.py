"""Rollout engines in graphs, with sync windows: the same requests with and without migration between engines.

``python -m tests.verl_patches.features.rollout_rebalance.engine_program FOLDER`` runs the cases one after another: it
imports everything once and forks the ranks of each. Every rank writes what its engine generated and the metrics of its
decode loop, by run, to ``FOLDER/CASE/found.RANK.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import verl_patches.prelude_patch as prelude

prelude.activate()

from tests.float32_exchange import exchange_in_float32  # noqa: E402
from tests.npu_emulator.vllm_ascend_models import write_checkpoint  # noqa: E402
from tests.npu_emulator.vllm_ascend_program import IMPORTED_ONCE  # noqa: E402
from tests.ranks import fork_ranks  # noqa: E402
from tests.verl_patches.features.rollout_rebalance import cases  # noqa: E402
from tests.verl_patches.features.rollout_rebalance.cases import (  # noqa: E402
    CASES,
    FAULTS,
    MODEL,
    SEQUENCES,
    STOP_TOKEN,
    WINDOW,
    Case,
    lengths_of,
)
from tests.vllm_cases import import_once  # noqa: E402

Request = tuple[int, list[int], Any]
"""The place of a prompt among those of all engines in their original order, its tokens, and vLLM's SamplingParams."""


def main(folder: Path) -> None:
    """Run one rank of the case that the folder is named after."""
    os.environ["NPU_EMULATOR_STRICT"] = "0"  # attention is narrower than the graphs' kernels accept
    with exchange_in_float32():
        generate(folder, CASES[folder.name])
    os._exit(0)


def generate(folder: Path, case: Case) -> None:
    """Run all runs of the case in one engine."""
    import torch
    import torch.distributed as dist
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    EngineArgs._is_v1_supported_oracle = lambda self, model_config: True  # vLLM says that float32 is for tests
    rank = int(os.environ["RANK"])
    activate(case, "off")
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    engine, engines = rank // case.tensor_parallel, case.ranks // case.tensor_parallel
    scheduler = {"enabled": True, "enable_chunked_prefill": True}
    cut = {"max_num_batched_tokens": case.part, "enable_chunked_prefill": True} if case.part else {}
    llm = LLM(
        model=str(folder.parent / MODEL), skip_tokenizer_init=True, dtype="float32", max_num_seqs=SEQUENCES,
        seed=engine, num_gpu_blocks_override=case.blocks, gpu_memory_utilization=0.4, swap_space=0,
        max_model_len=case.longest, enable_prefix_caching=False, tensor_parallel_size=case.tensor_parallel,
        distributed_executor_backend="external_launcher",
        additional_config={"torchair_graph_config": {"enabled": True, "graph_batch_sizes": list(case.sizes)}}
        | ({"ascend_scheduler_config": scheduler} if cut else {}),
        **cut,
    )  # fmt: skip
    found = {}
    for run in case.runs:
        activate(case, run.partition(": ")[0].partition(" ")[2])
        with faulty(run.partition(": ")[2]):
            found[run] = generated(llm, requests_of(engine, engines, run.partition(" ")[0]), engine)
    (folder / f"found.{rank}.json").write_text(json.dumps(found))


def activate(case: Case, how: str) -> None:
    """Activate the settings. `how`: requests migrate (on) or not (off), or one of `cases.AGREED`."""
    from verl_patches.features import settings

    sections: dict[str, dict[str, Any]] = {
        "dp_sync": cases.AGREED.get(how, {"lease_steps": WINDOW}),
        "rollout": {"expert_parallel_size": case.ranks},
        "request_noise": {"enabled": True},
        "rollout_rebalance": {"enabled": how == "on"},
    }
    vllm = {"num_gpu_blocks_override": case.blocks}
    rollout = {"engine_kwargs": {"vllm": vllm}}
    settings.activate(settings.OverlaySettings.from_config({"overlay": sections, "rollout": rollout}))


@contextlib.contextmanager
def faulty(fault: str) -> Iterator[None]:
    with mock.patch(*FAULTS[fault]) if fault else contextlib.nullcontext():
        yield


def requests_of(engine: int, engines: int, kind: str) -> list[Request]:
    """Return an engine's requests in order; see `generated`."""
    if kind not in ("dealt", "placed"):
        return own_requests(engine, engines, kind)
    import msgspec

    from post_training.plan.first_placement import first_placement
    from verl_patches.features.request_noise.seeds import Seeds

    lengths = [length for each in range(engines) for length in lengths_of(each, engines)]
    everyone = [request for each in range(engines) for request in own_requests(each, engines, kind)]
    order = first_placement(lengths, engines) if kind == "placed" else list(range(len(everyone)))
    drawn = Seeds(1, lambda: 1).draw(len(everyone)).tolist()
    seeds = [drawn[place] for place in cases.seed_places(order)]
    dealt = [
        (place, everyone[place][1], msgspec.structs.replace(everyone[place][2], seed=seed))
        for place, seed in zip(order, seeds, strict=True)
    ]
    return dealt[engine * SEQUENCES : (engine + 1) * SEQUENCES]


def own_requests(engine: int, engines: int, kind: str) -> list[Request]:
    """Return an engine's requests in their original order.

    Sampled answers also end at a stop token, except for the kind "drawn", and the first prompt has two of them. Every
    other request has no seed and gets one from the engine.
    """
    from vllm import SamplingParams

    common: dict[str, Any] = {"ignore_eos": True, "logprobs": 0, "detokenize": False}
    return [
        (
            engine * SEQUENCES + number,
            [1, 3 + engine, 10 + number, 40 + 3 * number, 17, *range(4, 4 + 3 * number)],
            SamplingParams(temperature=0.0, max_tokens=length, **common)
            if kind in ("greedy", "long")
            else SamplingParams(
                n=1 + (number == 0),
                seed=None if number % 2 else 100 * engine + number,
                max_tokens=length,
                stop_token_ids=[] if kind == "drawn" else [STOP_TOKEN],
                **common,
            ),
        )
        for number, length in enumerate(lengths_of(engine, engines, kind))
    ]


@contextlib.contextmanager
def counted_preemptions(llm: Any) -> Iterator[list[str]]:
    """Yield a list that collects the requests that leave the running ones unfinished."""
    scheduler, found = llm.llm_engine.engine_core.engine_core.scheduler, []
    schedule = scheduler.schedule

    def looked_at() -> Any:
        running = {request.request_id for request in scheduler.running}
        scheduled = schedule()
        found.extend(request.request_id for request in scheduler.waiting if request.request_id in running)
        return scheduled

    with mock.patch.object(scheduler, "schedule", looked_at):
        yield found


def generated(llm: Any, requests: list[Request], seed: int) -> dict[str, Any]:
    """Return tokens, log-probs and finish reasons of every answer in order, the places of their prompts among those of
    all engines, and the metrics of the decode loop. `seed` is for the device's random numbers."""
    import torch

    from post_training.process_context import process_context
    from verl_patches.features.measure import step_record

    process_context().take(step_record.StepRecord)
    torch.npu.manual_seed(seed)
    places, prompts, params = zip(*requests, strict=True)
    with counted_preemptions(llm) as preempted:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], list(params), use_tqdm=False)
    returned = zip(places, outputs, strict=False)  # fewer if migrated requests do not return
    answers = [answer for output in outputs for answer in output.outputs]
    counts = step_record.current_record().counts
    return {
        "places": [place for place, output in returned for _ in output.outputs],
        "tokens": [list(answer.token_ids) for answer in answers],
        "log_probs": [[by[token].logprob for by, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers],
        "preempted": len(preempted),
        "reasons": [answer.finish_reason for answer in answers],
        "device's numbers": hashlib.sha256(torch.npu.get_rng_state().numpy().tobytes()).hexdigest(),
        "metrics": {name.removeprefix("rollout/"): value for name, value in counts.items() if "rollout/" in name},
    }


def run_cases(folder: Path, names: list[str]) -> int:
    """Run the cases, and return the number that failed."""
    dies = max(case.ranks for case in CASES.values())
    os.environ |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_MLA_PA": "1"}
    os.environ |= {"VLLM_CACHE_ROOT": str(folder / "compiled"), "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["NPU_EMULATOR_DEVICES"] = str(dies)
    write_checkpoint(MODEL, folder / MODEL)
    import_once(IMPORTED_ONCE)
    failed = 0
    for number, name in enumerate(names):
        os.environ["NPU_EMULATOR_NODE"] = f"rebalance.{os.getpid()}.{number}"
        (folder / name).mkdir()
        failed += fork_ranks(__spec__.name, CASES[name].ranks, folder / name)
    return failed


if __name__ == "__main__":
    sys.exit(run_cases(Path(sys.argv[1]), sys.argv[2:] or list(CASES)))
