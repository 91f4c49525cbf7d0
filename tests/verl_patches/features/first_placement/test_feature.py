"""A configuration in which prompts cannot be dealt to arbitrary engines is rejected in one sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlay import ConfigurationError
from verl_patches.features.first_placement.feature import FIRST_PLACEMENT

(check,) = FIRST_PLACEMENT.checks


def job(mode: str = "sync") -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": {"mode": mode}}}


def settings(enabled: bool = True, noise: bool = True, partial: bool = False) -> Any:
    return SimpleNamespace(
        first_placement=SimpleNamespace(enabled=enabled),
        request_noise=SimpleNamespace(enabled=noise),
        partial_rollout=SimpleNamespace(enabled=partial),
    )


@pytest.mark.parametrize(
    ("config", "chosen", "sentence"),
    [
        (job(), settings(noise=False), "needs actor_rollout_ref.overlay.request_noise.enabled=true"),
        (job(), settings(partial=True), "cannot be combined with .*partial_rollout.enabled=true"),
        (job("async"), settings(), "rollout.mode=async sends them one by one. Set it to sync"),
    ],
)
def test_invalid_first_placement_rejected(config, chosen, sentence):
    with pytest.raises(ConfigurationError, match=sentence) as rejected:
        check(config, chosen)
    assert "first_placement.enabled=true" in str(rejected.value) and "\n" not in str(rejected.value)
    check(config, settings(enabled=False))


def test_requests_with_noise_of_their_own_pass():
    check(job(), settings())


def test_it_is_off_unless_it_is_asked_for():
    assert not FIRST_PLACEMENT.settings().enabled
