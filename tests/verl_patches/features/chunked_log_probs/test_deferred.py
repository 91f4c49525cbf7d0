"""Deferred logits through verl's and Megatron's own path: the results are equal, and full logits never exist."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import verl_patches.prelude_patch  # noqa: F401
from tests.forked import MEGATRON
from tests.post_training.models.megatron.deepseek_v3_checkpoint import VOCABULARY, write_checkpoint_and_reference
from tests.ranks import run_ranks
from verl_patches.features.chunked_log_probs.deferred import DeferredLogits, deferring, output_layer

RANKS = 4
LAYOUTS = ("tensor2", "tensor2_pipeline2", "tensor4_bfloat16", "tied_tensor2")


def write_tied_checkpoint(folder: Path) -> None:
    """Write a Qwen2 checkpoint whose output layer is its embedding."""
    torch.manual_seed(6)
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"], vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        rms_norm_eps=1e-6, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).float().save_pretrained(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("deferred")
    write_checkpoint_and_reference(folder)
    (folder / "checkpoint").rename(folder / "deepseek_v3")
    write_tied_checkpoint(folder / "tied_qwen2")
    run_ranks("tests.verl_patches.features.chunked_log_probs.model_program", RANKS, folder, imported=MEGATRON)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_model_gives_what_upstream_gives(results, layout):
    """Gradients of every parameter on every stage match. In bfloat16, those of hidden states are rounded per chunk."""
    last = [rank[layout] for rank in results if "log_probs" in rank[layout]["distances"]]
    assert last
    for rank in results:
        gradients = dict(rank[layout]["distances"])
        for name in ("log_probs", "entropy"):
            assert gradients.pop(name, 0.0) < 1e-6
        assert max(gradients.values()) < (0.02 if layout == "tensor4_bfloat16" else 2e-6), gradients
    assert all(rank["sizes"]["log_probs"] > 1 for rank in last)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_layer_returns_no_logits(results, layout):
    returned = [rank[layout]["returned"] for rank in results if "log_probs" in rank[layout]["distances"]]
    assert returned and all(whole > 0 and deferred == 0 for whole, deferred in returned)


def column_parallel_layer(**changed: object) -> torch.nn.Module:
    """Build an output layer as Megatron's GPTModel does, except for the given attributes."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.bias, layer.gather_output = None, False
    layer.config = SimpleNamespace(defer_embedding_wgrad_compute=False)
    for name, value in changed.items():
        setattr(layer, name, value)
    return layer


def model_with(layer: torch.nn.Module | None, **options: bool) -> torch.nn.Module:
    model = torch.nn.Module()
    model.output_layer = layer
    model.ddp_config = SimpleNamespace(overlap_grad_reduce=False, **options)
    return model


def test_plain_output_layer_deferred():
    layer = column_parallel_layer()
    assert output_layer(model_with(layer)) is layer


@pytest.mark.parametrize(
    "changed",
    [
        {"bias": torch.zeros(2)},
        {"gather_output": True},
        {"config": SimpleNamespace(defer_embedding_wgrad_compute=True)},
        {"forward": lambda input_: (input_, None)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_unusual_output_layer_kept(changed):
    assert output_layer(model_with(column_parallel_layer(**changed))) is None


def test_other_output_layers_kept():
    """These are a stage without one, a critic's head, and a subclass, as MindSpeed-LLM uses for segments."""
    segmented = column_parallel_layer()
    segmented.__class__ = type("Segmented", (type(segmented),), {})
    for layer in (None, torch.nn.Linear(2, 1), segmented):
        assert output_layer(model_with(layer)) is None


def test_hooked_or_overlapped_layer_kept():
    """Hooks, as those of the log-prob comparison, read logits; Megatron's overlapped reduction needs a gradient."""
    hooked = column_parallel_layer()
    hooked.register_forward_hook(lambda *_: None)
    assert output_layer(model_with(hooked)) is None
    model = model_with(column_parallel_layer())
    model.ddp_config.overlap_grad_reduce = True
    assert output_layer(model) is None


def test_layer_restored_after_failure():
    layer = column_parallel_layer()
    with pytest.raises(KeyError), deferring(model_with(layer), print, 1):
        assert layer.forward("hidden", weight="weight") == ("hidden", None)
        raise KeyError
    assert "forward" not in vars(layer)


def test_other_labels_rejected():
    labels = torch.zeros(1, 3, dtype=torch.int64)
    logits = DeferredLogits(torch.zeros(1, 3, 2), torch.zeros(5, 2), labels, mock.Mock(), 1)
    assert logits.shape == (1, 3, 5)
    with pytest.raises(ValueError, match="labels from another"):
        logits.log_probs(labels.clone())
