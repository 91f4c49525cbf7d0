"""vLLM reports the log-probs of the distribution that it samples from."""

from overlay import wrap
from verl_patches.features.temperature.feature import TEMPERATURE

_METADATA = {
    "feature": TEMPERATURE,
    "evidence": "executed",
    "upstream": "https://github.com/vllm-project/vllm/pull/21398",
    "remove_when": "the pinned vLLM has logprobs_mode and verl sets processed_logprobs",
}


@wrap(
    "vllm.v1.sample.sampler:Sampler.forward",
    why="the V1 sampler takes log-probs before it divides by the temperature; this hands the temperature on",
    **_METADATA,
)
def forward(upstream, self, logits, sampling_metadata):
    from verl_patches.features.temperature.scaling import reporting

    with reporting(sampling_metadata.temperature):
        return upstream(self, logits, sampling_metadata)


@wrap(
    "vllm.v1.sample.sampler:Sampler.compute_logprobs",
    why="the V1 sampler takes log-probs before it divides by the temperature",
    **_METADATA,
)
def compute_logprobs(upstream, self, logits):
    from verl_patches.features.temperature.scaling import as_sampled

    return upstream(self, as_sampled(logits))
