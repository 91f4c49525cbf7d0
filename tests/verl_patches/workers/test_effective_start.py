"""A worker starts only if all of its patches are in use."""

from types import SimpleNamespace

import pytest

import overlay
from overlay.errors import EffectiveError
from verl_patches.workers import megatron_workers


def test_a_worker_whose_patches_are_not_in_use_does_not_start(monkeypatch):
    built = []

    def not_in_use():
        raise EffectiveError("patches are not in use: x")

    monkeypatch.setattr(overlay, "assert_effective", not_in_use)
    with pytest.raises(EffectiveError, match="patches are not in use"):
        megatron_workers.init_model_reported(built.append, SimpleNamespace(rank=1))
    assert len(built) == 1
    monkeypatch.setattr(overlay, "assert_effective", lambda: None)
    megatron_workers.init_model_reported(built.append, SimpleNamespace(rank=1))
