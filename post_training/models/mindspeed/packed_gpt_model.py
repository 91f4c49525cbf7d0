"""DeepSeek-V3 built by MindSpeed-LLM, which must have started, on packed sequences as Megatron describes them."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from mindspeed.utils import set_actual_seq_len

from post_training.models.expert_bias import float32_expert_bias
from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig


class PackedGPTModel(GPTModel):
    """A ``GPTModel`` that tells MindSpeed-LLM's attention where sequences end, before each forward pass.

    Recomputation in backward finds the ends of its own micro batch, because MindSpeed-LLM stores them with the
    activations that it checkpoints. Positions count through the whole micro batch: rotary embedding depends only on
    distances.

    The routers' ``expert_bias`` stays float32: MindSpeed-LLM registers it so, and Megatron's ``Float16Module`` casts it
    with all other buffers.
    """

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "PackedGPTModel":
        with float32_expert_bias(self):
            super()._apply(fn, recurse)
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSeqParams,
        **options: Any,
    ) -> torch.Tensor:
        """[1, tokens] to [1, tokens, vocabulary / tensor parallel size] on the last stage; other arguments as there."""
        set_actual_seq_len(packed_seq_params.cu_seqlens_q.tolist()[1:])
        return super().forward(input_ids, position_ids, attention_mask, **options)


def with_arguments(config: DeepseekV3TransformerConfig) -> DeepseekV3TransformerConfig:
    """Add everything that MindSpeed-LLM's code reads to `config`, and return it.

    Fields of Megatron's own configuration come from MindSpeed-LLM's arguments; the fields of this project stay, except
    `num_layer_list`: if it is set, MindSpeed-LLM looks for offsets that only its own argument sets.
    """
    own = {each.name for each in fields(DeepseekV3TransformerConfig)} - {
        each.name for each in fields(TransformerConfig)
    }
    theirs = vars(core_transformer_config_from_args(get_args()))
    config.__dict__.update({name: value for name, value in theirs.items() if name not in own - {"num_layer_list"}})
    return config


def build_deepseek_v3(
    config: DeepseekV3TransformerConfig, hf_config: Any, pre_process: bool, post_process: bool
) -> PackedGPTModel:
    """Build this pipeline stage.

    ``pre_process`` adds the embedding, ``post_process`` the final norm and the output layer.
    Raises ``ValueError`` for a checkpoint that ties the embedding to the output layer.
    """
    if hf_config.tie_word_embeddings:
        raise ValueError("DeepSeek-V3 with tied word embeddings is not supported")
    args = get_args()
    return PackedGPTModel(
        config=config,
        transformer_layer_spec=import_module(args.spec),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        position_embedding_type=args.position_embedding_type,
    )
