"""vLLM reports the log-probs of the distribution that it samples from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from overlay import wrap
from verl_patches.features.temperature.feature import TEMPERATURE

if TYPE_CHECKING:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler


@wrap(
    "vllm.v1.sample.sampler:Sampler.forward",
    relies_on=["vllm.v1.sample.sampler:Sampler.sample", "vllm.v1.sample.sampler:Sampler.gather_logprobs"],
    why="the V1 sampler takes log-probs before it divides by the temperature and removes tokens by top-k, top-p and "
    "min-p; this passes the temperature on, and reports the distribution of the draw",
    feature=TEMPERATURE,
    evidence="executed",
    upstream="https://github.com/vllm-project/vllm/pull/21398",
    remove_when="the pinned vLLM has logprobs_mode and verl sets processed_logprobs",
)
def forward(
    upstream: Callable[..., SamplerOutput], self: Sampler, logits: torch.Tensor, sampling_metadata: SamplingMetadata
) -> SamplerOutput:
    from verl_patches.features.temperature.sampled import as_drawn, drawing
    from verl_patches.features.temperature.scaling import reporting

    with reporting(sampling_metadata.temperature), drawing(sampling_metadata) as draw:
        output = upstream(self, logits, sampling_metadata)
    return as_drawn(output, draw, sampling_metadata.temperature)


@wrap(
    "vllm.v1.sample.sampler:Sampler.compute_logprobs",
    why="the V1 sampler takes log-probs before it divides by the temperature",
    feature=TEMPERATURE,
    evidence="executed",
    upstream="https://github.com/vllm-project/vllm/pull/21398",
    remove_when="the pinned vLLM has logprobs_mode and verl sets processed_logprobs",
)
def compute_logprobs(upstream: Callable[..., torch.Tensor], self: Sampler, logits: torch.Tensor) -> torch.Tensor:
    from verl_patches.features.temperature.scaling import as_sampled

    return upstream(self, as_sampled(logits))
