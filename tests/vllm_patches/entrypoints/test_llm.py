"""The arguments that reach the vLLM engine, of those that verl passes."""

import dataclasses
from unittest.mock import MagicMock

import pytest

from tests.demonstrations import installed
from verl_patches.features import settings
from verl_patches.features.residency.feature import ResidencySettings
from vllm_patches.entrypoints import llm

FROM_VERL = {
    "model": "path",
    "enable_sleep_mode": True,
    "disable_mm_preprocessor_cache": True,
    "limit_mm_per_prompt": None,
    "tensor_parallel_size": 2,
}


class Recorder:
    def __call__(self, engine, **kwargs):
        self.kwargs = kwargs


@pytest.fixture
def active(monkeypatch):
    def choose(**changes):
        chosen = dataclasses.replace(settings.OverlaySettings.all_off(), **changes)
        monkeypatch.setattr(settings, "current", lambda: chosen)

    return choose


def test_multi_modal_options_of_a_text_model_are_left_out(active):
    active()
    upstream = Recorder()
    llm.init(upstream, object(), **FROM_VERL)
    assert upstream.kwargs == {"model": "path", "enable_sleep_mode": True, "tensor_parallel_size": 2}


def test_multi_modal_options_of_a_multi_modal_model_are_kept(active):
    active()
    upstream = Recorder()
    llm.init(upstream, object(), **{**FROM_VERL, "limit_mm_per_prompt": {"image": 2}})
    assert upstream.kwargs["limit_mm_per_prompt"] == {"image": 2}
    assert upstream.kwargs["disable_mm_preprocessor_cache"] is True


def test_sleep_mode_is_off_where_residency_manages_memory(active):
    active(residency=ResidencySettings(enabled=True))
    upstream = Recorder()
    installed(llm.init_without_sleep_mode, upstream)(object(), **FROM_VERL)
    assert upstream.kwargs["enable_sleep_mode"] is False


def test_direct_loading_off_changes_nothing(active):
    active()
    upstream = Recorder()
    installed(llm.init_with_direct_loading, upstream)(object(), **FROM_VERL)
    assert upstream.kwargs == FROM_VERL


def test_what_was_absorbed_at_random_follows_the_weights_that_were_loaded(active, monkeypatch):
    import torch.distributed as dist

    from post_training.checkpoint import loading
    from post_training.layouts import model_tensors, placements
    from post_training.models import families as tables
    from post_training.reshard import mla_refresh

    done = []
    for module, name in (
        (dist, "get_rank"), (loading, "ignored_prefixes"), (loading, "load_from_huggingface"),
        (mla_refresh, "refresh_absorbed_weights"), (model_tensors, "rollout_tensors"), (tables, "table_for"),
        (placements, "rollout_placement"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, name=name: done.append(name) or MagicMock())
    active(load_from_hf="folder")
    llm.init_with_direct_loading(lambda self: done.append("engine"), MagicMock())
    assert done[0] == "engine" and done[-2:] == ["load_from_huggingface", "refresh_absorbed_weights"]


def test_expert_parallelism_off_changes_nothing(active):
    active()
    upstream = Recorder()
    installed(llm.init_with_expert_parallel, upstream)(object(), **FROM_VERL)
    assert upstream.kwargs == FROM_VERL
