"""Pre-training of the tiny DeepSeek-V3 with MindSpeed-LLM: weights for a layout, a run, and the losses of its log."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

from tests.upstream import checkouts as sources
from tests.upstream import tiny_deepseek as tiny
from tests.upstream.checkouts import CONVERTER, PRETRAIN

_LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
_TIME_LIMIT = 1500  # seconds
# Constants in MindSpeed-LLM's converter, for the tiny model.
_CONVERTER_SIZES = {
    "HIDDEN_SIZE": tiny.HIDDEN,
    "NUM_EXPERTS": tiny.EXPERTS,
    "FIRST_K_DENSE_REPLACE": tiny.DENSE_LAYERS,
    "MTP_LAYER_INDEX": tiny.LAYERS,
    "NUM_ATTENTION_HEADS": tiny.HEADS,
    "QK_NOPE_HEAD_DIM": tiny.NOPE,
    "QK_ROPE_HEAD_DIM": tiny.ROPE,
    "V_HEAD_DIM": tiny.VALUE,
}
_ARGUMENTS = f"""
--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --use-mcore-models
--num-layers {tiny.LAYERS} --hidden-size {tiny.HIDDEN} --ffn-hidden-size 128 --num-attention-heads {tiny.HEADS}
--vocab-size {tiny.VOCABULARY} --padded-vocab-size {tiny.VOCABULARY} --make-vocab-size-divisible-by 1
--tokenizer-type PretrainedFromHF --seq-length {tiny.SEQUENCE} --max-position-embeddings 512
--untie-embeddings-and-output-weights --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
--use-fused-swiglu --use-fused-rmsnorm --use-flash-attn --no-masked-softmax-fusion --attention-softmax-in-fp32
--attention-dropout 0 --hidden-dropout 0 --multi-head-latent-attention --qk-layernorm
--qk-rope-head-dim {tiny.ROPE} --qk-nope-head-dim {tiny.NOPE} --v-head-dim {tiny.VALUE}
--q-lora-rank {tiny.QUERY_RANK} --kv-lora-rank {tiny.KEY_VALUE_RANK}
--position-embedding-type rope --use-rotary-position-embeddings --use-fused-rotary-pos-emb --rotary-base 10000
--rope-scaling-type yarn --rope-scaling-factor 4 --rope-scaling-original-max-position-embeddings 128
--rope-scaling-beta-fast 32 --rope-scaling-beta-slow 1 --rope-scaling-mscale 1 --rope-scaling-mscale-all-dim 1
--num-experts {tiny.EXPERTS} --moe-router-topk 2 --moe-intermediate-size 32 --n-shared-experts 1
--first-k-dense-replace {tiny.DENSE_LAYERS} --moe-layer-freq 1 --n-group 2 --topk-group 1 --routed-scaling-factor 2.5
--moe-router-load-balancing-type noaux_tc --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--norm-topk-prob --seq-aux --moe-aux-loss-coeff 0.0001 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
--moe-permutation-async-comm --use-fused-moe-token-permute-and-unpermute
--micro-batch-size 1 --global-batch-size {tiny.GLOBAL_BATCH} --train-iters {tiny.ITERATIONS} --use-distributed-optimizer
--lr 1e-4 --min-lr 1e-7 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1 --adam-beta1 0.9 --adam-beta2 0.999
--split 100,0,0 --log-interval 1 --save-interval 1000 --eval-interval 1000 --eval-iters 0
--no-load-optim --no-load-rng --finetune --bf16 --distributed-backend nccl
"""


@dataclass(frozen=True)
class Layout:
    """How a run is spread over dies. The cluster's extra arguments change how it computes, but not the result."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1
    experts_over_tensor_ranks: bool = False
    extra: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks with the least data parallelism that the experts need."""
        return self.tensor * self.pipeline * self.expert * self.context

    @property
    def arguments(self) -> list[str]:
        sizes = {
            "tensor-model": self.tensor,
            "pipeline-model": self.pipeline,
            "expert-model": self.expert,
            "context": self.context,
        }
        given = [part for name, size in sizes.items() for part in (f"--{name}-parallel-size", str(size))]
        given += ["--sequence-parallel"] if self.tensor > 1 else []
        given += ["--moe-tp-extend-ep"] if self.experts_over_tensor_ranks else []
        return [*given, *self.extra]


def convert(checkouts: Path, model: Path, target: Path, layout: Layout) -> None:
    """Write the weights of a HuggingFace folder for a layout with MindSpeed-LLM's own converter."""
    # The converter imports this for quantised weights, which are not used here.
    sys.modules.setdefault("bitsandbytes", types.ModuleType("bitsandbytes"))
    spec = importlib.util.spec_from_file_location("convert_ckpt_deepseek3", checkouts / CONVERTER)
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    vars(converter).update(_CONVERTER_SIZES)
    converter.CkptConvert(
        hf_model_path=str(model), mg_save_path=str(target), num_layers=tiny.LAYERS, num_dense_layers=tiny.DENSE_LAYERS,
        tp_size=layout.tensor, pp_size=layout.pipeline, ep_size=layout.expert, moe_grouped_gemm=True,
        moe_tp_extend_ep=layout.experts_over_tensor_ranks,
    ).run()  # fmt: skip


@dataclass(frozen=True)
class Workplace:
    """The checkouts, their packages assembled to import from, and the tiny model with its tokens."""

    checkouts: Path
    packages: Path
    model: Path
    tokens: Path

    def train(self, folder: Path, layout: Layout, weights: Path, dtype: str, leave_out: str = "nothing") -> list[float]:
        """Return the loss of each iteration. `dtype` is bfloat16, which uses the emulator's strict mode, or float32.

        Raises AssertionError with the end of the log if the run fails or has another number of iterations.
        """
        folder.mkdir()
        arguments = [
            *_ARGUMENTS.split(), "--tokenizer-name-or-path", str(self.model), "--data-path", str(self.tokens),
            "--data-cache-path", str(folder / "cache"), "--load", str(weights), *layout.arguments,
        ]  # fmt: skip
        request = {
            "script": str(self.checkouts / PRETRAIN), "arguments": arguments, "ranks": layout.ranks, "dtype": dtype,
            "leave_out": leave_out,
        }  # fmt: skip
        (folder / "request.json").write_text(json.dumps(request))
        ended = subprocess.run(
            [sys.executable, "-m", "tests.upstream.mindspeed_llm_program", str(folder)],
            env=self._environment(folder), cwd=folder, text=True, timeout=_TIME_LIMIT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        losses = [float(found) for found in _LOSS.findall(ended.stdout)]
        told = f"exit code {ended.returncode}, losses {losses}: {ended.stdout[-4000:]}"
        assert ended.returncode == 0 and len(losses) == tiny.ITERATIONS, told
        return losses

    def _environment(self, folder: Path) -> dict[str, str]:
        # Megatron compiles its dataset helper with the python3 that is found first.
        return (
            os.environ
            | sources.environment(self.packages)
            | {
                "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
                "CUDA_DEVICE_MAX_CONNECTIONS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "NPU_EMULATOR_METERS": str(folder / "meters"),
            }
        )
