"""Which engine builds DeepSeek-V3: MindSpeed-LLM where it is importable, this project otherwise."""

import importlib
import sys

import pytest

import verl_patches.prelude_patch  # noqa: F401


@pytest.fixture
def stand_in_for_mindspeed_llm(tmp_path, monkeypatch):
    package = tmp_path / "mindspeed_llm" / "tasks" / "models" / "spec"
    package.mkdir(parents=True)
    (package / "deepseek_spec.py").write_text("layer_spec = 'from MindSpeed-LLM'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mindspeed_llm"]:
        del sys.modules[name]


def test_mindspeed_llm_is_used_where_it_is_importable(stand_in_for_mindspeed_llm):
    from megatron_patches.core.models.gpt.deepseek_v3_layer_specs import select_layer_spec

    assert select_layer_spec(config=None) == "from MindSpeed-LLM"


def test_our_layers_are_used_without_it(monkeypatch):
    from megatron_patches.core.models.gpt import deepseek_v3_layer_specs

    monkeypatch.setattr(deepseek_v3_layer_specs, "deepseek_v3_block_spec", lambda config: ("ours", config))
    assert deepseek_v3_layer_specs.select_layer_spec("configuration") == ("ours", "configuration")
