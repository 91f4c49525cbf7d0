"""One vLLM engine that runs a sample in many batches.

    python -m verl_plugin.batch_invariance.worker JOB RESULT

Without graphs it also searches for operators that depend on the batch, one
after another: an operator that was found is computed one row at a time from
then on, and the search begins again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from verl_plugin.batch_invariance.comparison import (
    Answer,
    Break,
    compare_log_probs,
    first_break,
)
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.situations import (
    AGAIN,
    ALONE,
    BLOCK,
    SITUATIONS,
    Prompts,
    Situation,
    batch_of,
    make_prompts,
)
from verl_plugin.batch_invariance.trace import OperatorTrace, Replacement, Rows, Trace, one_row_at_a_time

PROMPT, TOKENS, SLOTS = BLOCK + 22, 12, 8
_MOST_OPERATORS = 20
_ATTENTION = "npu.npu_fused_infer_attention_score.default"
_OWN_ATTENTION = "npu_fused_infer_attention_score_batch_invariant"
# Operators that, by definition, compute each row of their first tensor independently.
BY_ROW = (
    "aten.linear.default", "aten.mm.default", "aten.matmul.default", "aten._softmax.default",
    "aten._log_softmax.default", "npu.npu_rms_norm.default", "npu.npu_add_rms_norm.default", "npu.npu_swiglu.default",
)  # fmt: skip


class Engine:
    """vLLM's engine in this process."""

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        options: dict[str, Any] = {"enforce_eager": job.graph == "eager"}
        if job.graph != "eager":
            options["compilation_config"] = {"cudagraph_mode": job.graph, "cudagraph_capture_sizes": list(job.sizes)}
        self.llm = LLM(
            model=job.model, skip_tokenizer_init=True, max_num_seqs=SLOTS, seed=0, num_gpu_blocks_override=64,
            gpu_memory_utilization=0.4, max_model_len=2 * BLOCK, max_num_batched_tokens=2048, dtype=job.dtype,
            enable_prefix_caching=True, **options,
        )  # fmt: skip
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.prompts: Prompts = make_prompts(vocabulary, PROMPT)
        self.steps = self.slot_steps = 0
        self._count_steps()

    def _count_steps(self) -> None:
        execute = self.runner.execute_model

        def counted(scheduled: Any, *arguments: Any, **named: Any) -> Any:
            if scheduled.total_num_scheduled_tokens:
                self.steps += 1
                self.slot_steps += len(scheduled.num_scheduled_tokens)
            return execute(scheduled, *arguments, **named)

        self.runner.execute_model = counted

    def run(self, situation: Situation) -> Answer:
        """Generate greedily and return the sample's answer."""
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        if situation.cached:
            self._generate([self.prompts.sample], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
        # The scheduler reads it at every step; 0 means whole prompts in vLLM.
        self.scheduler.scheduler_config.long_prefill_token_threshold = situation.chunk
        batch, place = batch_of(situation, self.prompts)
        greedy = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, detokenize=False
        )  # fmt: skip
        output = self._generate(batch, greedy)[place].outputs[0]
        rows = zip(output.logprobs, output.token_ids, strict=True)
        return Answer(tuple(output.token_ids), tuple(row[token].logprob for row, token in rows))

    def _generate(self, batch: Sequence[Sequence[int]], parameters: Any) -> list[Any]:
        given = [{"prompt_token_ids": list(each)} for each in batch]
        return list(self.llm.generate(given, parameters, use_tqdm=False))

    def traced(self, situation: Situation, replacements: Mapping[str, Replacement]) -> tuple[Answer, Trace]:
        """Run a situation; return the sample's answer and its trace."""
        operators = OperatorTrace(replacements)
        with ExitStack() as stack:
            stack.enter_context(operators.following(self.runner.model))
            stack.enter_context(self._forwards(operators))
            stack.enter_context(operators)
            answer = self.run(situation)
        return answer, operators.trace

    @contextmanager
    def _forwards(self, operators: OperatorTrace) -> Iterator[None]:
        """Tell `operators` the sample's rows in each forward."""
        runner, model = self.runner, self.runner.model
        execute = runner.execute_model
        scheduled: dict[str, int] = {}

        def executed(given: Any, *arguments: Any, **named: Any) -> Any:
            scheduled.clear()
            scheduled.update(given.num_scheduled_tokens)
            operators.at(None)
            return execute(given, *arguments, **named)

        def begin(_: Any, arguments: Any, named: Any) -> None:
            operators.at(self._rows(scheduled, named["positions"].shape[-1]) if scheduled else None)

        runner.execute_model = executed
        handles = [
            model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            model.register_forward_hook(lambda *_: operators.behind_the_model()),
        ]
        try:
            yield
        finally:
            runner.execute_model = execute
            for handle in handles:
                handle.remove()

    def _rows(self, scheduled: Mapping[str, int], tokens: int) -> Rows | None:
        """Return the sample's rows in a forward of `tokens` rows; None if the sample is not in it."""
        batch = self.runner.input_batch
        start = 0
        for number, request in enumerate(batch.req_ids):
            count = scheduled[request]
            if tuple(self.runner.requests[request].prompt_token_ids) == self.prompts.sample:
                first = int(batch.num_computed_tokens_cpu[number])
                places = tuple((start + each, first + each) for each in range(count))
                is_sampled = first + count >= PROMPT
                return Rows(tokens, len(batch.req_ids), places, number if is_sampled else None)
            start += count
        return None


def replacement_of(operator: str) -> Replacement:
    """Return a function that computes an operator for one row, or one query, at a time.

    Raises:
        LookupError: there is no such function.
    """
    if operator in BY_ROW:
        return one_row_at_a_time
    if operator != _ATTENTION or not hasattr(torch.ops.batch_invariant_ops, _OWN_ATTENTION):
        raise LookupError(f"no function here computes {operator} independently of the batch")
    attention = getattr(torch.ops.batch_invariant_ops, _OWN_ATTENTION)
    return lambda _, arguments, named: attention(*arguments, **named)


def search(engine: Engine) -> tuple[list[dict[str, Any]], str]:
    """Return the operators that depend on the batch, in the order found, and why the search ended early, or ""."""
    replacements: dict[str, Replacement] = {}
    found: list[dict[str, Any]] = []
    for _ in range(_MOST_OPERATORS):
        broken = _broken(engine, replacements)
        if not broken:
            return found, ""
        operator = Counter(each.operator for each in broken.values()).most_common(1)[0][0]
        if operator in replacements:
            return found, f"{operator} depends on the batch even when computed one row at a time"
        named = {name: each for name, each in broken.items() if each.operator == operator}
        situation, first = next(iter(named.items()))
        found.append(dataclasses.asdict(first) | {"situations": list(named), "situation": situation})
        try:
            replacements[operator] = replacement_of(operator)
        except LookupError as error:
            return found, str(error)
    return found, f"more than {_MOST_OPERATORS} operators"


def _broken(engine: Engine, replacements: Mapping[str, Replacement]) -> dict[str, Break]:
    """Return, by situation, the first operator whose result for the sample differs from that of the sample alone."""
    alone, of_alone = engine.traced(ALONE, replacements)
    broken = {}
    for situation in SITUATIONS:
        answer, trace = engine.traced(situation, replacements)
        same = compare_log_probs(alone, answer).compared
        first = first_break(of_alone, trace, PROMPT, same)
        if first is not None:
            broken[situation.name] = first
    return broken


def measure(engine: Engine) -> dict[str, Any]:
    """Compare log-probs in all situations with those of the sample alone, and count steps and seconds of the runs."""
    engine.steps = engine.slot_steps = 0
    started = time.monotonic()
    alone = engine.run(ALONE)
    compared = {each.name: compare_log_probs(alone, engine.run(each)) for each in (AGAIN, *SITUATIONS)}
    seconds = time.monotonic() - started
    return {
        "alone": dataclasses.asdict(alone),
        "compared": {name: dataclasses.asdict(each) for name, each in compared.items()},
        "steps": engine.steps,
        "slot_steps": engine.slot_steps,
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job, and write its results at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    options = parser.parse_args(arguments)
    given = json.loads(options.job.read_text())
    job = Job(**given | {"sizes": tuple(given["sizes"])})
    import vllm_ascend.worker.worker  # noqa: F401  (before parts of it)

    if job.planted:
        __import__(job.planted)
    engine = Engine(job)
    result = measure(engine)
    if job.search:
        result["operators"], result["ended"] = search(engine)
    options.result.write_text(json.dumps(result))
    os._exit(0)  # do not wait for threads and processes that vLLM started


if __name__ == "__main__":
    main()
