"""A naive reference written from the public description: whole checkpoints in memory, torch operations, save.

Tests compare the tools with it, and the benchmark times them against it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from post_training.models.deepseek_v3 import DeepseekV3Shape

BLOCK = 128


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Load every stored tensor of a HuggingFace folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def dequantised(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return FP8 weights w as bf16(float32(w) * s), with s expanded to the shape of w, and all others unchanged."""
    weights = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scales = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            tensor = (tensor.float() * scales[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        weights[name] = tensor
    return weights


def cast_folder(source: Path, output: Path) -> None:
    """Cast FP8 to BF16, file by file; a scale may be in another file than its weight."""
    output.mkdir(parents=True)
    where = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    weight_map = {}
    for file in sorted(set(where.values())):
        stored = load_file(source / file)
        for name, tensor in list(stored.items()):
            scale = f"{name}_scale_inv"
            if tensor.dtype == torch.float8_e4m3fn and scale not in stored:
                with safe_open(source / where[scale], framework="pt") as other:
                    stored[scale] = other.get_tensor(scale)
        weights = dequantised(stored)
        save_file(weights, output / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(weights, file)
    (output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_shards(source: Path, output: Path, shape: DeepseekV3Shape, layout: "ShardLayout") -> None:
    """Write shards of BF16 weights stage by stage: load the files that have the stage's layers, slice, save."""
    where = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    for pp in range(layout.pp):
        first = sum(layout.stages[:pp])
        layers = tuple(f"model.layers.{layer}." for layer in range(first, first + layout.stages[pp]))
        outer = [name for name in where if not name.startswith("model.layers.")] if pp in (0, layout.pp - 1) else []
        needed = {name for name in where if name.startswith(layers)}.union(outer)
        weights: dict[str, torch.Tensor] = {}
        for file in sorted({where[name] for name in needed}):
            weights |= {name: tensor for name, tensor in load_file(source / file).items() if name in needed}
        ReferenceShards(weights, shape, layout).save(output, range(pp, pp + 1))


@dataclass(frozen=True)
class ShardLayout:
    """A layout of MindSpeed-LLM's shards.

    `stages` has the number of layers of each pipeline stage, or with `chunks` > 1 of each chunk of each stage, with the
    stage varying fastest.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    stages: tuple[int, ...] = ()
    chunks: int = 1
    grouped: bool = True
    tp_extend_ep: bool = False
    mm_split: bool = False
    mtp: bool = False

    def options(self) -> list[str]:
        """Return the command-line options for this layout."""
        options = []
        for name, size in (("tensor", self.tp), ("pipeline", self.pp), ("expert", self.ep)):
            options += [f"--target-{name}-parallel-size", str(size)]
        if self.chunks > 1:
            options += ["--num-layers-per-virtual-pipeline-stage", str(self.stages[0])]
        else:
            options += ["--num-layer-list", ",".join(map(str, self.stages))]
        flags = {"moe-grouped-gemm": self.grouped, "moe-tp-extend-ep": self.tp_extend_ep, "mla-mm-split": self.mm_split}
        options += [f"--{flag}" for flag, given in flags.items() if given]
        return options + (["--num-nextn-predict-layers", "1"] if self.mtp else [])


State = dict[str, torch.Tensor]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage, as torch.save writes the whole storage of a view."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()


class ReferenceShards:
    """Per-rank shards of whole weights, as described by MindSpeed-LLM's documentation and models."""

    def __init__(self, weights: State, shape: DeepseekV3Shape, layout: ShardLayout) -> None:
        self.weights, self.shape, self.layout = weights, shape, layout

    def path(self, tp: int, pp: int, ep: int) -> str:
        name = f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.layout.pp > 1 else "")
        return f"iter_0000001/{name}" + (f"_{ep:03d}" if self.layout.ep > 1 else "") + "/model_optim_rng.pt"

    def content(self, tp: int, pp: int, ep: int) -> dict:
        """Return the content that torch.save writes for a rank."""
        content: dict = {"checkpoint_version": 3.0, "iteration": 1}
        for chunk in range(self.layout.chunks):
            key = f"model{chunk}" if self.layout.chunks > 1 else "model"
            content[key] = {name: _own(tensor) for name, tensor in self._model(tp, pp, ep, chunk).items()}
        return content

    def save(self, output: Path, stages: Iterable[int] | None = None) -> None:
        for pp in range(self.layout.pp) if stages is None else stages:
            for ep in range(self.layout.ep):
                for tp in range(self.layout.tp):
                    path = output / self.path(tp, pp, ep)
                    path.parent.mkdir(parents=True)
                    torch.save(self.content(tp, pp, ep), path)
        (output / "latest_checkpointed_iteration.txt").write_text("1")

    def save_as_published(self, output: Path) -> None:
        """Save as MindSpeed-LLM's convert_ckpt_deepseek3.py does: each state dict is a defaultdict(dict)."""
        for pp in range(self.layout.pp):
            for ep in range(self.layout.ep):
                for tp in range(self.layout.tp):
                    content = self.content(tp, pp, ep)
                    states = {
                        key: defaultdict(dict, state) for key, state in content.items() if key.startswith("model")
                    }
                    path = output / self.path(tp, pp, ep)
                    path.parent.mkdir(parents=True)
                    numbers = {"checkpoint_version": 3.0, "iteration": 1}
                    torch.save(states | numbers, path, pickle_protocol=4, _use_new_zipfile_serialization=True)
        (output / "latest_checkpointed_iteration.txt").write_text("1")

    def _model(self, tp: int, pp: int, ep: int, chunk: int) -> State:
        layout, weights = self.layout, self.weights
        part = chunk * layout.pp + pp
        first = sum(layout.stages[:part])
        state: State = {}
        for position in range(layout.stages[part]):
            state |= self._layer(first + position, f"decoder.layers.{position}.", tp, ep)
        if part == 0:
            state["embedding.word_embeddings.weight"] = weights["model.embed_tokens.weight"].chunk(layout.tp)[tp]
        if part == layout.pp * layout.chunks - 1:
            norm = "final_layernorm.weight" if layout.mtp else "decoder.final_layernorm.weight"
            state[norm] = weights["model.norm.weight"]
            state["output_layer.weight"] = weights["lm_head.weight"].chunk(layout.tp)[tp]
            state |= self._mtp(tp, ep) if layout.mtp else {}
        return state

    def _mtp(self, tp: int, ep: int) -> State:
        layer, tps = self.shape.layers, self.layout.tp
        of = {name: self.weights[f"model.layers.{layer}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
        state = self._layer(layer, "mtp_layers.0.transformer_layer.", tp, ep)
        state |= {"mtp_layers.0.enorm.weight": of["enorm"], "mtp_layers.0.hnorm.weight": of["hnorm"]}
        state["mtp_layers.0.eh_proj.weight"] = of["eh_proj"].chunk(tps)[tp]
        state["mtp_layers.0.final_layernorm.weight"] = self.weights[f"model.layers.{layer}.shared_head.norm.weight"]
        if self.layout.pp > 1:
            embedding = self.weights[f"model.layers.{layer}.embed_tokens.weight"]
            state["mtp_layers.0.embedding.word_embeddings.weight"] = embedding.chunk(tps)[tp]
        return state

    def _layer(self, layer: int, local: str, tp: int, ep: int) -> State:
        prefix, tps = f"model.layers.{layer}.", self.layout.tp
        state = {
            f"{local}input_layernorm.weight": self.weights[f"{prefix}input_layernorm.weight"],
            f"{local}pre_mlp_layernorm.weight": self.weights[f"{prefix}post_attention_layernorm.weight"],
        }
        state |= self._attention(f"{prefix}self_attn.", f"{local}self_attention.", tp)
        if layer < self.shape.dense_layers:
            return state | self._gated(f"{prefix}mlp.", f"{local}mlp.", tps, tp)
        state[f"{local}mlp.router.weight"] = self.weights[f"{prefix}mlp.gate.weight"]
        state[f"{local}mlp.router.expert_bias"] = self.weights[f"{prefix}mlp.gate.e_score_correction_bias"]
        state |= self._gated(f"{prefix}mlp.shared_experts.", f"{local}mlp.shared_experts.", tps, tp)
        return state | self._experts(f"{prefix}mlp.experts.", f"{local}mlp.experts.", tp, ep)

    def _attention(self, prefix: str, local: str, tp: int) -> State:
        of = {name.removeprefix(prefix): weight for name, weight in self.weights.items() if name.startswith(prefix)}
        tps, shape = self.layout.tp, self.shape
        state = {
            f"{local}linear_qkv.weight": torch.cat([of["q_a_proj.weight"], of["kv_a_proj_with_mqa.weight"]]),
            f"{local}q_layernorm.weight": of["q_a_layernorm.weight"],
            f"{local}k_layernorm.weight": of["kv_a_layernorm.weight"],
            f"{local}linear_proj.weight": of["o_proj.weight"].chunk(tps, dim=1)[tp],
        }
        if not self.layout.mm_split:
            state[f"{local}linear_qb.weight"] = of["q_b_proj.weight"].chunk(tps)[tp]
            state[f"{local}linear_kvb.weight"] = of["kv_b_proj.weight"].chunk(tps)[tp]
            return state
        queries = of["q_b_proj.weight"].unflatten(0, (shape.heads, -1)).chunk(tps)[tp]
        values = of["kv_b_proj.weight"].unflatten(0, (shape.heads, -1)).chunk(tps)[tp]
        for name, part in (
            ("linear_qk_nope", queries[:, : shape.qk_nope]),
            ("linear_qk_rope", queries[:, shape.qk_nope :]),
            ("linear_kv_nope", values[:, : shape.qk_nope]),
            ("linear_v", values[:, shape.qk_nope :]),
        ):
            state[f"{local}{name}.weight"] = part.flatten(0, 1)
        return state

    def _gated(self, prefix: str, local: str, parts: int, index: int) -> State:
        gate, up, down = (self.weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
        return {
            f"{local}linear_fc1.weight": torch.cat([gate.chunk(parts)[index], up.chunk(parts)[index]]),
            f"{local}linear_fc2.weight": down.chunk(parts, dim=1)[index],
        }

    def _experts(self, prefix: str, local: str, tp: int, ep: int) -> State:
        layout, hidden = self.layout, self.shape.hidden
        group, index = (layout.ep, ep) if not layout.tp_extend_ep else (layout.tp * layout.ep, ep * layout.tp + tp)
        count = self.shape.experts // group
        cuts = (1, 0) if layout.tp_extend_ep else (layout.tp, tp)
        state, firsts, seconds = {}, [], []
        for slot in range(count):
            own = f"{local}local_experts.{slot}."
            expert = self._gated(f"{prefix}{index * count + slot}.", own, *cuts)
            if not layout.grouped:
                state |= expert
            firsts.append(expert[f"{own}linear_fc1.weight"].t())
            seconds.append(expert[f"{own}linear_fc2.weight"].t())
        if layout.grouped:
            state[f"{local}weight1"] = torch.stack(firsts).reshape(hidden, -1)
            state[f"{local}weight2"] = torch.stack(seconds).reshape(-1, hidden)
        return state
