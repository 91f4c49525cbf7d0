"""Log-probs of training at the temperature of the rollout."""

from collections.abc import Callable
from typing import Any

from overlay import wrap
from verl_patches.features import settings
from verl_patches.features.temperature.feature import TEMPERATURE


@wrap(
    "verl.models.mcore.model_forward:gptmodel_forward",
    feature=TEMPERATURE,
    evidence="executed",
    why="verl 0.4.0's Megatron log-probs ignore the rollout temperature, so training and rollout differ unless it is 1",
    upstream="https://github.com/verl-project/verl/pull/3133",
    remove_when="the pinned verl contains the fix",
)
def gptmodel_forward(
    upstream: Callable[..., Any], *args: Any, logits_processor: Callable[..., Any] | None = None, **kwargs: Any
) -> Any:
    from verl_patches.features.temperature.scaling import at_temperature

    if logits_processor is not None:
        logits_processor = at_temperature(logits_processor, settings.current().rollout_temperature)
    return upstream(*args, logits_processor=logits_processor, **kwargs)
