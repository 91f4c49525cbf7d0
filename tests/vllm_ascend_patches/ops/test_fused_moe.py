"""vLLM-Ascend selects experts by the overlay's deal if the feature is on, and by the router if it is off."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import verl_patches.prelude_patch  # noqa: F401
from post_training.models.router_balance import logits_for_dealt_experts
from tests.demonstrations import installed
from verl_patches.features import settings
from verl_patches.features.router_balance.feature import RouterBalanceSettings
from vllm_ascend_patches.ops import fused_moe


class Method(SimpleNamespace):
    """Stand-in for vLLM-Ascend's quantization method that records the router logits it is given."""

    def apply(self, router_logits, **options):
        self.seen = router_logits


@pytest.mark.parametrize("forced", [True, False])
def test_the_choice_of_every_layer_is_dealt_out_where_it_is_on(forced):
    ours = replace(settings.current(), router_balance=RouterBalanceSettings(forced=forced))
    method, made = Method(), []
    with mock.patch.object(settings, "current", return_value=ours):
        installed(fused_moe.__init__, lambda self, moe: made.append((self, moe)))(method, moe="configuration")
    assert made == [(method, "configuration")]
    logits = torch.randn(4, 16)
    method.apply(router_logits=logits, top_k=2)
    expected = logits_for_dealt_experts(logits, 2) if forced else logits
    assert torch.equal(method.seen, expected) and ("apply" in vars(method)) == forced
