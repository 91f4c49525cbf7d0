"""The patches that let verl 0.4.0 use megatron-core 0.8.0: what they add, and what they reject."""

import pytest
import torch

import verl_patches.prelude_patch  # noqa: F401
from megatron_patches.core import parallel_state as parallel_state_patch
from megatron_patches.core.optimizer.cuda_type_names import cuda_type_names


def arguments(*args, **kwargs):
    return args, kwargs


def test_expert_tensor_parallel_size_is_taken_away_where_it_says_nothing():
    for harmless in (None, 2):
        found = parallel_state_patch.initialize_model_parallel(
            arguments,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=3,
            expert_tensor_parallel_size=harmless,
        )
        assert found == ((2,), {"pipeline_model_parallel_size": 3})
    assert parallel_state_patch.initialize_model_parallel(arguments, expert_tensor_parallel_size=1) == ((1,), {})


def test_an_expert_tensor_parallel_size_of_its_own_rejected():
    with pytest.raises(ValueError, match="expert_tensor_parallel_size=1"):
        parallel_state_patch.initialize_model_parallel(arguments, 2, expert_tensor_parallel_size=1)


@pytest.mark.parametrize("what", ["world_size", "rank", "group"])
def test_experts_are_cut_by_the_tensor_parallel_group(what):
    from megatron.core import parallel_state

    added, own = (getattr(parallel_state, f"get_{kind}_parallel_{what}") for kind in ("expert_tensor", "tensor_model"))
    assert added is own


def test_packed_sequence_parameters_keep_padded_bounds():
    from megatron.core.packed_seq_params import PackedSeqParams

    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q_padded="query", cu_seqlens_kv_padded="key")
    assert (packed.qkv_format, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded) == ("thd", "query", "key")
    assert PackedSeqParams().cu_seqlens_q_padded is None


def test_transformer_config_has_the_fields_that_verl_reads():
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, expert_tensor_parallel_size=1)
    assert config.num_layers_in_first_pipeline_stage is None
    assert config.account_for_loss_in_pipeline_split is False


@pytest.mark.parametrize(
    "field", [{"num_layers_in_first_pipeline_stage": 1}, {"account_for_embedding_in_pipeline_split": True}]
)
def test_transformer_config_rejects_what_0_8_0_cannot_do(field):
    from megatron.core.transformer.transformer_config import TransformerConfig

    with pytest.raises(ValueError, match=next(iter(field))):
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, **field)


def test_transformer_config_still_rejects_unknown_fields():
    from megatron.core.transformer.transformer_config import TransformerConfig

    with pytest.raises(TypeError, match="no_such_field"):
        TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, no_such_field=1)


def test_multi_token_prediction_rejected():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    with pytest.raises(ValueError, match="multi-token prediction"):
        get_gpt_mtp_block_spec(None, None)


def test_type_names_are_cuda_names_within_the_context_only():
    tensor = torch.zeros(1).npu()
    outside = tensor.type()
    with cuda_type_names():
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.to(torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type() == "torch.FloatTensor"
        assert tensor.type(torch.int32).dtype is torch.int32
    assert tensor.type() == outside == "torch.npu.FloatTensor"


def test_fused_functions_run_as_written():
    from megatron.core.jit import jit_fuser

    assert jit_fuser(arguments) is arguments
