"""The layers that DeepSeek-V3 is built from."""

import importlib
import sys
from types import SimpleNamespace

import pytest

import verl_patches.prelude_patch  # noqa: F401

HUGGINGFACE = SimpleNamespace(vocab_size=8, max_position_embeddings=16, tie_word_embeddings=False)


@pytest.fixture
def mindspeed_llm_beside_it(tmp_path, monkeypatch):
    """Fake MindSpeed-LLM on sys.path that, like the real one, cannot be imported before its arguments are set."""
    spec = tmp_path / "mindspeed_llm" / "tasks" / "models" / "spec"
    spec.mkdir(parents=True)
    (spec / "deepseek_spec.py").write_text("raise AssertionError('args is not initialized.')\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "mindspeed_llm"]:
        del sys.modules[name]


def test_our_layers_are_built_where_mindspeed_llm_lies_beside_them(mindspeed_llm_beside_it, monkeypatch):
    from post_training.models.megatron import deepseek_v3_model

    monkeypatch.setattr(deepseek_v3_model, "deepseek_v3_block_spec", lambda config: ("our layers", config))
    monkeypatch.setattr(deepseek_v3_model, "GPTModel", lambda **options: options)
    built = deepseek_v3_model.build_deepseek_v3("configuration", HUGGINGFACE, pre_process=True, post_process=False)
    assert built["transformer_layer_spec"] == ("our layers", "configuration")
    assert (built["pre_process"], built["post_process"], built["vocab_size"]) == (True, False, 8)
    with pytest.raises(AssertionError, match="args is not initialized"):
        importlib.import_module("mindspeed_llm.tasks.models.spec.deepseek_spec")
