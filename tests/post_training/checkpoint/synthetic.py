"""Make DeepSeek-V3 checkpoints of any dimensions: BF16 or FP8 with scales, in several files, with or without MTP."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config

from post_training.checkpoint.fp8 import BLOCK, scale_shape
from post_training.models.deepseek_v3 import DeepseekV3Shape, hf_shapes

LARGEST_FP8 = 448.0
KEPT = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "gate.weight", "eh_proj.weight", "head.weight")
"""Endings of weights that DeepSeek keeps in bfloat16; e_score_correction_bias is float32."""


@dataclass(frozen=True)
class Synthetic:
    """A random checkpoint.

    Every weight has its own seed, so that FP8 and BF16 checkpoints of one seed have equal unquantised tensors.

    Attributes:
        config: The model's configuration.
        fp8: Whether linear weights are quantised.
        files: Number of files.
        seed: Seed of all weights.
        dtype: Dtype of the unquantised weights.
        random_codes: Whether FP8 codes are drawn directly, instead of quantising normal weights.
    """

    config: DeepseekV3Config
    fp8: bool = True
    files: int = 3
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    random_codes: bool = False

    @property
    def shape(self) -> DeepseekV3Shape:
        return DeepseekV3Shape.from_config(self.config)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every stored tensor, scales after their weights."""
        shapes = hf_shapes(self.shape) | mtp_shapes(self.shape)
        for number, (name, dims) in enumerate(shapes.items()):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            if name.endswith("e_score_correction_bias"):
                yield name, 5 + torch.rand(dims, generator=generator) / 5
            elif self.fp8 and not name.endswith(KEPT):
                draw = random_codes if self.random_codes else quantised
                codes, scales = draw(dims, generator, self.config.initializer_range)
                yield name, codes
                yield f"{name}_scale_inv", scales
            else:
                yield name, self._unquantised(name, dims, generator)

    def _unquantised(self, name: str, dims: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return (torch.rand(dims, generator=generator) + 0.5).to(self.dtype)
        if name.endswith("shared_head.head.weight"):
            return dict(replace(self, fp8=False).only("lm_head.weight"))["lm_head.weight"]
        if name.endswith("embed_tokens.weight") and name != "model.embed_tokens.weight":
            return dict(replace(self, fp8=False).only("model.embed_tokens.weight"))["model.embed_tokens.weight"]
        return (torch.randn(dims, generator=generator) * self.config.initializer_range).to(self.dtype)

    def only(self, wanted: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield one tensor, as `tensors` would draw it."""
        for number, (name, dims) in enumerate(hf_shapes(self.shape).items()):
            if name == wanted:
                yield name, self._unquantised(name, dims, torch.Generator().manual_seed(self.seed * 1_000_003 + number))

    def write(self, folder: Path) -> Path:
        """Write configuration, files of about equal size, the index and a tokenizer file; return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.to_dict()
        if self.fp8:
            config["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            }
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "generation_config.json").write_text("{}")
        self._write_files(folder)
        return folder

    def _write_files(self, folder: Path) -> None:
        weight_map, waiting, size, number = {}, {}, 0, 1
        shapes = hf_shapes(self.shape) | mtp_shapes(self.shape)
        limit = sum(torch.Size(dims).numel() for dims in shapes.values()) * (1 if self.fp8 else 2) // self.files + 1
        total = 0

        def flush() -> None:
            file = f"model-{number:05d}-of-{self.files:06d}.safetensors"
            save_file(waiting, folder / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(waiting, file))

        for name, tensor in self.tensors():
            if size > limit and number < self.files:
                flush()
                waiting, size, number = {}, 0, number + 1
            waiting[name] = tensor
            size += tensor.numel() * tensor.element_size()
            total += tensor.numel() * tensor.element_size()
        flush()
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def quantised(dims: tuple[int, ...], generator: torch.Generator, deviation: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a normal weight in FP8, scaled so that the largest value of every block becomes 448."""
    weight = torch.randn(dims, generator=generator) * deviation
    scales = torch.empty(scale_shape(dims))
    codes = torch.empty(dims, dtype=torch.float8_e4m3fn)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[block].abs().max() / LARGEST_FP8
            codes[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return codes, scales


def random_codes(
    dims: tuple[int, ...], generator: torch.Generator, deviation: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw any codes except NaN, and scales over several powers of two; fast, but useless as a model."""
    count = torch.Size(dims).numel()
    words = torch.empty(-(-count // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    codes = words.view(torch.uint8)[:count].reshape(dims)
    codes.sub_(codes.bitwise_and(0x7F).eq_(0x7F))
    scales = deviation * 2.0 ** (4 * torch.rand(scale_shape(dims), generator=generator) - 8)
    return codes.view(torch.float8_e4m3fn), scales


def mtp_shapes(shape: DeepseekV3Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the multi-token prediction layers' tensors (DeepSeek-V3, README_WEIGHTS.md)."""
    shapes = {}
    for layer in range(shape.layers, shape.layers + shape.mtp_layers):
        deeper = hf_shapes(replace(shape, layers=layer + 1))
        prefix = f"model.layers.{layer}."
        shapes |= {name: dims for name, dims in deeper.items() if name.startswith(prefix)}
        shapes |= {
            f"{prefix}embed_tokens.weight": (shape.vocab, shape.hidden),
            f"{prefix}enorm.weight": (shape.hidden,),
            f"{prefix}hnorm.weight": (shape.hidden,),
            f"{prefix}eh_proj.weight": (shape.hidden, 2 * shape.hidden),
            f"{prefix}shared_head.norm.weight": (shape.hidden,),
            f"{prefix}shared_head.head.weight": (shape.vocab, shape.hidden),
        }
    return shapes


def small_config(**overrides: int) -> DeepseekV3Config:
    """Return a DeepSeek-V3 small enough for hundreds of conversions; no width is a multiple of 128, some exceed it."""
    sizes = dict(
        vocab_size=192,
        hidden_size=160,
        intermediate_size=320,
        moe_intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=40,
        q_lora_rank=136,
        qk_rope_head_dim=16,
        qk_nope_head_dim=24,
        v_head_dim=32,
        first_k_dense_replace=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=128,
    )
    return DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], initializer_range=0.05, **(sizes | overrides))
