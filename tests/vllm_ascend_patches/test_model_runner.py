"""Which graphs of the rollout's model are refused while its weights leave the device."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from overlay import ConfigurationError
from tests.demonstrations import Upstream, installed
from verl_patches.features import settings
from verl_patches.features.residency.feature import ResidencySettings
from vllm_ascend_patches.worker.model_runner_v1 import load_model


@pytest.mark.parametrize(
    ("residency", "captures", "refused"),
    [
        (ResidencySettings(), True, True),
        (ResidencySettings(), False, False),
        (ResidencySettings(rollout_addresses="reserved"), True, False),
        (ResidencySettings(enabled=False), True, False),
    ],
)
def test_acl_graphs_need_addresses_that_stay(residency, captures, refused):
    runner, upstream = SimpleNamespace(use_aclgraph=captures), Upstream()
    chosen = replace(settings.current(), residency=residency)
    with (
        mock.patch.object(settings, "_current", chosen),
        mock.patch("verl_patches.features.residency.reserved.reserve_weights"),
        pytest.raises(ConfigurationError, match="choose reserved") if refused else nullcontext(),
    ):
        installed(load_model, upstream)(runner)
    assert len(upstream.calls) == (not refused)
