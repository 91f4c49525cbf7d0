"""Build the part of DeepSeek-V3 that a pipeline stage holds."""

from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel

from post_training.models.megatron.deepseek_v3_config import DeepseekV3TransformerConfig
from post_training.models.megatron.deepseek_v3_layer_specs import deepseek_v3_block_spec


def build_deepseek_v3(
    config: DeepseekV3TransformerConfig,
    hf_config: Any,
    pre_process: bool,
    post_process: bool,
    freeze_moe_router: bool = False,
) -> GPTModel:
    """Return a ``GPTModel`` with the layers of this stage.

    ``pre_process`` adds the embedding, ``post_process`` the final norm and the output layer. ``freeze_moe_router``
    keeps the router weights out of training. The embedding and the output layer have weights of their own; raises
    ``ValueError`` for a checkpoint that ties them.
    """
    if hf_config.tie_word_embeddings:
        raise ValueError("DeepSeek-V3 with tied word embeddings is not supported")
    model = GPTModel(
        config=config,
        transformer_layer_spec=deepseek_v3_block_spec(config),
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=False,
        # MLA makes its own rotary embedding; GPTModel must not compute one of a different shape.
        position_embedding_type="none",
    )
    if freeze_moe_router:
        for layer in model.decoder.layers:
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.weight.requires_grad = False
    return model
