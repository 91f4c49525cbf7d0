"""One vLLM engine, or one of two data-parallel ones, whose forwards are watched for one sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from verl_plugin.batch_invariance.comparison import Answer
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.situations import BLOCK, Prompts, Situation, batch_of, make_prompts
from verl_plugin.batch_invariance.trace import OperatorTrace, Replacement, Rows, Trace, one_row_at_a_time
from verl_plugin.rollout import BACKEND
from verl_plugin.rollout.invariant_products import products_of_experts

PROMPT, TOKENS, SLOTS = BLOCK + 22, 12, 8
PAIRED = {"enable_expert_parallel": True, "async_scheduling": False, "distributed_executor_backend": "uni"}
_ATTENTION = "npu.npu_fused_infer_attention_score.default"
_EXPERTS = "npu.npu_grouped_matmul.default"
_OWN_ATTENTION = "npu_fused_infer_attention_score_batch_invariant"
# Operators that, by definition, compute each row of their first tensor independently.
BY_ROW = (
    "aten.linear.default", "aten.mm.default", "aten.matmul.default", "aten._softmax.default",
    "aten._log_softmax.default", "npu.npu_rms_norm.default", "npu.npu_add_rms_norm.default", "npu.npu_swiglu.default",
)  # fmt: skip


class Engine:
    """vLLM's engine in this process.

    Attributes:
        replaced: operators that are replaced in the runs to come; None while nothing is traced.
    """

    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self.job = job
        self.replaced: Sequence[str] | None = None
        self._runs_dummy = False
        options: dict[str, Any] = {"enforce_eager": job.graph == "eager"}
        if job.worker:
            options |= {"worker_cls": job.worker, "all2all_backend": BACKEND}
        if job.engines > 1:
            options |= PAIRED
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
        self.llm.reset_prefix_cache()
        if situation.cached:
            self._generate([self.prompts.sample], _greedy(1))
        # The scheduler reads it at every step; 0 means whole prompts in vLLM.
        self.scheduler.scheduler_config.long_prefill_token_threshold = situation.chunk
        batch, place = batch_of(situation, self.prompts)
        output = self._generate(batch, _greedy(TOKENS), situation.elsewhere)[place].outputs[0]
        rows = zip(output.logprobs, output.token_ids, strict=True)
        return Answer(tuple(output.token_ids), tuple(row[token].logprob for row, token in rows))

    def _generate(self, batch: Sequence[Sequence[int]], parameters: Any, elsewhere: int = 0) -> list[Any]:
        given = [{"prompt_token_ids": list(each)} for each in batch]
        if self.job.engines == 1:
            return list(self.llm.generate(given, parameters, use_tqdm=False))
        from vllm.distributed import get_dp_group

        get_dp_group().broadcast_object((elsewhere, self.replaced))
        return self._together(given, parameters)

    def end(self) -> None:
        """End the other engine."""
        from vllm.distributed import get_dp_group

        if self.job.engines > 1:
            get_dp_group().broadcast_object(None)

    def follow(self) -> None:
        """Be the other engine: run as many samples as the first one says, with the same operators, until it ends."""
        from vllm.distributed import get_dp_group

        while (order := get_dp_group().broadcast_object()) is not None:
            elsewhere, replaced = order
            given = [{"prompt_token_ids": list(each)} for each in self.prompts.others[:elsewhere]]
            with ExitStack() as stack:
                if replaced is not None:
                    stack.enter_context(OperatorTrace({name: replacement_of(name) for name in replaced}))
                self._together(given, _greedy(TOKENS))

    def _together(self, given: Sequence[Any], parameters: Any) -> list[Any]:
        """Generate as vLLM's DPEngineCoreProc does: each iteration is one forward on both engines."""
        engine = self.llm.llm_engine
        core = engine.engine_core.engine_core
        for number, prompt in enumerate(given):
            engine.add_request(str(number), prompt, parameters)
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests_dp(engine.output_processor.has_unfinished_requests()):
            engine.should_execute_dummy_batch = False
            before = self.steps
            if core.scheduler.has_requests():
                outputs |= {each.request_id: each for each in engine.step() if each.finished}
            if self.steps == before:
                self._runs_dummy = True
                core.execute_dummy_batch()
                self._runs_dummy = False
        return [outputs[str(number)] for number in range(len(given))]

    def traced(self, situation: Situation, replacements: Mapping[str, Replacement]) -> tuple[Answer, Trace]:
        """Run a situation; return the sample's answer and its trace."""
        operators = OperatorTrace(replacements)
        self.replaced = [*replacements]
        with ExitStack() as stack:
            stack.callback(setattr, self, "replaced", None)
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
            is_own = scheduled and not self._runs_dummy
            operators.at(self._rows(scheduled, named["positions"].shape[-1]) if is_own else None)

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
                rows = Rows(tokens, len(batch.req_ids), places, number if is_sampled else None)
                return self._gathered(rows) if self.job.engines > 1 else rows
            start += count
        return None

    def _gathered(self, rows: Rows) -> Rows:
        """Return the rows with those where all engines' tokens are gathered: each has as many as the busiest one."""
        from vllm.forward_context import get_forward_context

        most = get_forward_context().max_tokens_across_dp
        return dataclasses.replace(rows, gathered=self.job.engines * most, first=self.runner.dp_rank * most)


def replacement_of(operator: str) -> Replacement:
    """Return a function that computes an operator for one row, or one query, at a time.

    Raises:
        LookupError: there is no such function.
    """
    if operator in BY_ROW:
        return one_row_at_a_time
    if operator not in (_ATTENTION, _EXPERTS) or not hasattr(torch.ops.batch_invariant_ops, _OWN_ATTENTION):
        raise LookupError(f"no function here computes {operator} independently of the batch")
    if operator == _EXPERTS:
        return lambda _, arguments, named: [products_of_experts(*arguments, **named)]
    attention = getattr(torch.ops.batch_invariant_ops, _OWN_ATTENTION)
    return lambda _, arguments, named: attention(*arguments, **named)


def _greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
