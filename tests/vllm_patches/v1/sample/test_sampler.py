"""The switch of the temperature, in vLLM's own sampler with the patches around it."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")
from tests.demonstrations import installed  # noqa: E402
from verl_patches.features import settings  # noqa: E402
from verl_patches.features.temperature.feature import TemperatureSettings  # noqa: E402
from vllm_patches.v1.sample import sampler  # noqa: E402


@pytest.mark.parametrize(("enabled", "divisor"), [(True, 0.5), (False, 1.0)])
def test_log_probs_are_of_the_sampled_distribution_only_while_switched_on(monkeypatch, enabled, divisor):
    chosen = settings.OverlaySettings(temperature=TemperatureSettings(enabled=enabled))
    monkeypatch.setattr(settings, "_current", chosen)
    logits = torch.tensor([[1.0, 3.0, 2.0]])

    def forward(self, logits, sampling_metadata):
        return installed(sampler.compute_logprobs, lambda self, values: values.log_softmax(-1))(self, logits)

    reported = installed(sampler.forward, forward)(None, logits, SimpleNamespace(temperature=torch.tensor([0.5])))
    assert torch.equal(reported, (logits / divisor).log_softmax(-1))
