"""Rollout engines that end a rollout before its last answers and resume them, beside one that does not.

``python -m tests.verl_patches.features.partial_rollout.engine_program FOLDER`` runs the cases one after another: it
imports everything once and forks the ranks of each. Every rank writes what its engine generated, by run, to
``FOLDER/CASE/found.RANK.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import verl_patches.prelude_patch as prelude

prelude.activate()

from tests.npu_emulator.vllm_ascend_models import write_checkpoint  # noqa: E402
from tests.npu_emulator.vllm_ascend_program import IMPORTED_ONCE  # noqa: E402
from tests.ranks import fork_ranks  # noqa: E402
from tests.verl_patches.features.partial_rollout.cases import (  # noqa: E402
    CASES,
    FAULTS,
    LONGEST,
    MODEL,
    PASSES,
    PROMPTS,
    STOP_TOKENS,
    WINDOW,
    Case,
)
from tests.vllm_cases import import_once  # noqa: E402


def main(folder: Path) -> None:
    """Run one rank of the case that the folder is named after."""
    os.environ["NPU_EMULATOR_STRICT"] = "0"  # float32, and attention narrower than the kernels accept
    generate(folder, CASES[folder.name])
    os._exit(0)


def generate(folder: Path, case: Case) -> None:
    """Run all runs of the case in one engine."""
    import torch
    import torch.distributed as dist
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    from verl_patches.features import settings

    EngineArgs._is_v1_supported_oracle = lambda self, model_config: True  # vLLM says that float32 is for tests
    rank = int(os.environ["RANK"])
    sections = {"dp_sync": {"lease_steps": WINDOW}, "rollout": {"expert_parallel_size": case.ranks}}
    settings.activate(settings.OverlaySettings.from_config({"overlay": sections}))
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl")
    engine = rank // case.tensor_parallel
    llm = LLM(
        model=str(folder.parent / MODEL), skip_tokenizer_init=True, dtype="float32", max_num_seqs=PROMPTS, seed=engine,
        num_gpu_blocks_override=64, gpu_memory_utilization=0.4, swap_space=0, max_model_len=160, enforce_eager=True,
        enable_prefix_caching=False, tensor_parallel_size=case.tensor_parallel,
        distributed_executor_backend="external_launcher",
    )  # fmt: skip
    prompts = [[1, 3 + engine, 10 + number, 40 + 3 * number, 17] for number in range(PROMPTS)]
    found = {"unbroken": unbroken(llm, prompts), "stopped": stopped(llm, prompts, case)}
    for fault, (target, instead) in FAULTS.items():
        with mock.patch(target, instead):
            found[f"stopped: {fault}"] = stopped(llm, prompts, case)
    (folder / f"found.{rank}.json").write_text(json.dumps(found))


def parameters() -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=LONGEST, stop_token_ids=STOP_TOKENS, ignore_eos=True, logprobs=0, detokenize=False
    )


@contextlib.contextmanager
def metrics() -> Iterator[dict[str, float]]:
    """Yield a dict that receives the decode loop's counts within the block when it ends."""
    from post_training.process_context import process_context
    from verl_patches.features.measure import step_record

    process_context().take(step_record.StepRecord)
    counts: dict[str, float] = {}
    yield counts
    counts |= step_record.current_record().counts


def unbroken(llm: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Generate with vLLM's own method."""
    with metrics() as counts:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters(), use_tqdm=False)
    return {**described(outputs), "decode_steps": counts.get("rollout/decode_steps", 0)}


def stopped(llm: Any, prompts: list[list[int]], case: Case) -> dict[str, Any]:
    """Generate in several rollouts. Each ends when two more groups per engine are finished, the last when all are; the
    last prompt is due in the second."""
    from verl_patches.features.partial_rollout import engine

    engines = case.ranks // case.tensor_parallel
    rows = [engine.Row([engine.Begun()]) for _ in prompts]
    passes: list[dict[str, Any]] = []
    for number in range(PASSES):
        share = engine.Share(2 * engines * (number + 1), engines * len(prompts))
        due = [number == 1 and place == len(prompts) - 1 for place in range(len(prompts))]
        rows = [engine.Row(row.answers, each) for row, each in zip(rows, due, strict=True)]
        with metrics() as counts:
            outputs = engine.generate(llm, prompts, parameters(), rows, share)
        now = described(outputs)
        passes.append({**now, "decode_steps": counts.get("rollout/decode_steps", 0), "needed": share.groups})
        rows = [
            engine.Row([engine.Begun(tokens, log_probs, reason != engine.LEFT)])
            for tokens, log_probs, reason in zip(now["tokens"], now["log_probs"], now["reasons"], strict=True)
        ]
    return {**now, "passes": passes}


def described(outputs: list[Any]) -> dict[str, Any]:
    answers = [answer for output in outputs for answer in output.outputs]
    return {
        "tokens": [list(answer.token_ids) for answer in answers],
        "log_probs": [[by[token].logprob for by, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers],
        "reasons": [answer.finish_reason for answer in answers],
    }


def run_cases(folder: Path, names: list[str]) -> int:
    """Run the cases, and return the number that failed."""
    os.environ |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ASCEND_MLA_PA": "1"}
    os.environ |= {"VLLM_CACHE_ROOT": str(folder / "compiled"), "VLLM_DISABLE_COMPILE_CACHE": "1"}
    os.environ["NPU_EMULATOR_DEVICES"] = str(max(case.ranks for case in CASES.values()))
    write_checkpoint(MODEL, folder / MODEL)
    import_once(IMPORTED_ONCE)
    failed = 0
    for number, name in enumerate(names):
        os.environ["NPU_EMULATOR_NODE"] = f"partial.{os.getpid()}.{number}"
        (folder / name).mkdir()
        failed += fork_ranks(__spec__.name, CASES[name].ranks, folder / name)
    return failed


if __name__ == "__main__":
    sys.exit(run_cases(Path(sys.argv[1]), sys.argv[2:] or list(CASES)))
