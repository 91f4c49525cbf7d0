"""A negative control, loaded by VERL_USE_EXTERNAL_MODULES: vLLM discards the weights that it is given."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _keep_nothing(self: vLLMColocateWorkerExtension, *args: object, **kwargs: object) -> None:
    return None


vLLMColocateWorkerExtension._update_weights = _keep_nothing
