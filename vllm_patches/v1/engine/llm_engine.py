"""vLLM's engine goes along when verl asks it to sleep although sleep mode is off."""

from overlay import wrap
from verl_patches.features.residency.feature import RESIDENCY

_WHY = "verl 0.4.0 calls it around every rollout; with sleep mode off there is no memory pool to put to sleep, and"


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.sleep",
    feature=RESIDENCY,
    evidence="executed",
    why=f"{_WHY} residency has taken the weights and the KV cache off the device",
    upstream="not forwarded: part of this project's features",
    remove_when="verl calls it only when it asked for sleep mode",
)
def sleep(upstream, self, level=1):
    if self.vllm_config.model_config.enable_sleep_mode:
        upstream(self, level)


@wrap(
    "vllm.v1.engine.llm_engine:LLMEngine.wake_up",
    feature=RESIDENCY,
    evidence="executed",
    why=f"{_WHY} residency has brought them back",
    upstream="not forwarded: part of this project's features",
    remove_when="verl calls it only when it asked for sleep mode",
)
def wake_up(upstream, self, tags=None):
    if self.vllm_config.model_config.enable_sleep_mode:
        upstream(self, tags)
