"""transformers' patched Qwen2.5-VL on an NPU, with flash attention, equals the unpatched one on the host."""

import copy

import pytest
import torch
from transformers import AutoModelForVision2Seq

import overlay
from rehearsal.tiny_model.architecture import tiny_config
from tests.npu_emulator.operators.compare import refused
from verl_patches.models.transformers import qwen2_5_vl as patches

TARGET = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
GRID = torch.tensor([[1, 8, 8], [1, 4, 6]])


@pytest.fixture(scope="module")
def inputs():
    """Return text with two images of 16 and 6 vision tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor([[9, 5, *[7] * 16, 6, 20, 5, *[7] * 6, 6, 30, 31, 40]])
    pixels = torch.randn(int(GRID.prod(1).sum()), 3 * 2 * 14 * 14, generator=generator)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": pixels,
        "image_grid_thw": GRID,
    }


@pytest.fixture(scope="module")
def host_model():
    torch.manual_seed(0)
    config = tiny_config(0, 1, 2, "qwen2_5_vl")
    config.vision_config.window_size = 56  # whole windows and cut ones
    return AutoModelForVision2Seq.from_config(config, attn_implementation="sdpa").eval()


def logits_and_gradients(model, inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits.detach().cpu(), {name: weight.grad.cpu() for name, weight in model.named_parameters()}


def on_npu(host_model, inputs):
    config = copy.deepcopy(host_model.config)
    for each in (config, config.text_config, config.vision_config):
        each._attn_implementation = "flash_attention_2"
    model = type(host_model)(config).eval()
    assert type(model.visual.blocks[0].attn).__name__ == "Qwen2_5_VLVisionFlashAttention2"
    model.load_state_dict(host_model.state_dict())
    return logits_and_gradients(model.npu(), {name: value.npu() for name, value in inputs.items()})


def test_logits_and_gradients_equal_those_of_the_host(host_model, inputs, monkeypatch):
    expected, gradients = logits_and_gradients(host_model, inputs)
    monkeypatch.setattr(f"{TARGET}.apply_rotary_pos_emb_flashatt", patches.apply_rotary_pos_emb_flashatt)
    monkeypatch.setattr(f"{TARGET}.Qwen2_5_VisionPatchEmbed.forward", patches.forward)
    found, own = on_npu(host_model, inputs)
    assert (found - expected).abs().max() < 1e-5
    for name, gradient in gradients.items():
        assert (own[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name


def test_unpatched_rotary_embedding_fails(host_model, inputs):
    """The patches are taken away, in case another test of this process has activated them."""
    with overlay.unpatched(), refused("aclnnRotaryPositionEmbedding"):
        on_npu(host_model, inputs)
