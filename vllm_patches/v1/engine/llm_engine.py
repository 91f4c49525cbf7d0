"""vLLM's engine ignores sleep calls without sleep mode, checks and seeds requests, and reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from overlay import wrap
from verl_patches.features.compatibility.feature import VERL_ON_VLLM
from verl_patches.features.request_noise.feature import REQUEST_NOISE
from verl_patches.features.rollout_rebalance.feature import ROLLOUT_REBALANCE
from verl_patches.features.watch.feature import WATCH

if TYPE_CHECKING:
    from vllm.inputs import PromptType
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

_WHY = "verl 0.4.0 calls it around every rollout; with sleep mode off there is no memory pool to put to sleep, and"


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.sleep",
    feature=VERL_ON_VLLM,
    evidence="executed",
    why=f"{_WHY} residency has taken the weights and the KV cache off the device",
    upstream="https://github.com/verl-project/verl/pull/1464",
    remove_when="verl calls it only when it asked for sleep mode",
)
def sleep(upstream: Callable[..., None], self: LLMEngine, level: int = 1) -> None:
    if self.vllm_config.model_config.enable_sleep_mode:
        upstream(self, level)


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up",
    feature=VERL_ON_VLLM,
    evidence="executed",
    why=f"{_WHY} residency has brought them back",
    upstream="https://github.com/verl-project/verl/pull/1464",
    remove_when="verl calls it only when it asked for sleep mode",
)
def wake_up(upstream: Callable[..., None], self: LLMEngine, tags: list[str] | None = None) -> None:
    if self.vllm_config.model_config.enable_sleep_mode:
        upstream(self, tags)


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
    feature=REQUEST_NOISE,
    why="requests without a seed draw from the engine's random numbers, row by row of their batch, so each one's "
    "samples depend on the others",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM gives every request its own random numbers",
)
def add_request(
    upstream: Callable[..., None],
    self: LLMEngine,
    request_id: str,
    prompt: PromptType,
    params: SamplingParams,
    *args: Any,
    **options: Any,
) -> None:
    from verl_patches.features.request_noise.generators import with_noise_of_its_own

    upstream(self, request_id, prompt, with_noise_of_its_own(params), *args, **options)


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.add_request",
    feature=ROLLOUT_REBALANCE,
    why="a request whose parameters depend on where it began would not continue alike on another engine",
    upstream="not forwarded: part of this project's features",
    remove_when="vLLM moves requests between data-parallel engines while they decode",
)
def add_movable_request(
    upstream: Callable[..., None],
    self: LLMEngine,
    request_id: str,
    prompt: PromptType,
    params: SamplingParams,
    *args: Any,
    **options: Any,
) -> None:
    from verl_patches.features.rollout_rebalance.requests import require_movable

    require_movable(params, ROLLOUT_REBALANCE.switch)
    upstream(self, request_id, prompt, params, *args, **options)


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.step",
    feature=WATCH,
    evidence="executed",
    why="a generation lasts as long as its longest answer; it hangs when no step of it ends",
)
def step(upstream: Callable[..., list[RequestOutput]], self: LLMEngine) -> list[RequestOutput]:
    from post_training.hang_detection.signs import process_signs

    outputs = upstream(self)
    process_signs().progress()
    return outputs
