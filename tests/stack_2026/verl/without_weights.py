"""A negative control, which VERL_USE_EXTERNAL_MODULES loads: what vLLM is given it does not keep."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def _keep_nothing(self: vLLMColocateWorkerExtension, *args: object, **kwargs: object) -> None:
    return None


vLLMColocateWorkerExtension._update_weights = _keep_nothing
