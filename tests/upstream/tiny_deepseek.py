"""A tiny DeepSeek-V3 and its training tokens in MindSpeed-LLM's formats, and transformers' loss on them."""

from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import functional

LAYERS, DENSE_LAYERS, EXPERTS, HIDDEN, VOCABULARY = 4, 1, 8, 64, 320
HEADS, NOPE, ROPE, VALUE, QUERY_RANK, KEY_VALUE_RANK = 4, 16, 16, 16, 32, 32
SEQUENCE, GLOBAL_BATCH, ITERATIONS = 32, 4, 5
SHARD_SIZE = "50KB"  # several files and an index, as MindSpeed-LLM's converter requires


def configuration():
    from transformers import DeepseekV3Config

    scaling = {
        "type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    return DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=128, moe_intermediate_size=32,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, n_shared_experts=1,
        n_routed_experts=EXPERTS, routed_scaling_factor=2.5, kv_lora_rank=KEY_VALUE_RANK, q_lora_rank=QUERY_RANK,
        qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=DENSE_LAYERS, max_position_embeddings=512, rope_theta=10000.0,
        rope_scaling=scaling, initializer_range=0.1, rms_norm_eps=1e-6, norm_topk_prob=True, eos_token_id=2,
        bos_token_id=1,
    )  # fmt: skip


def write_model(folder: Path) -> torch.nn.Module:
    """Save a random float32 model with a tokenizer in `folder`, and return it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration(), torch_dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    words = Tokenizer(WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", bos_token="1").save_pretrained(folder)
    return model


def write_tokens(prefix: Path) -> None:
    """Write documents that count upwards in threes as a Megatron dataset, which is a pair of files."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    numbers = numpy.random.RandomState(0)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for _ in range(100):
        start, length = numbers.randint(3, 300), numbers.randint(20, 60)
        builder.add_item(torch.tensor([(start + 3 * position) % 290 + 5 for position in range(length)]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@torch.no_grad()
def loss_of_transformers(model: torch.nn.Module, tokens: Tensor, labels: Tensor) -> float:
    """Return the mean cross entropy over all positions of [samples, sequence] token numbers."""
    logits = model(tokens).logits
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
