"""Effects of the patches of Megatron-core."""

from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from tests.demonstrations import Upstream, demonstrates
from verl_patches.features.chunked_log_probs.deferred import DeferredLogits
from verl_patches.features.chunked_log_probs.feature import CHUNKED_LOG_PROBS
from verl_patches.features.compatibility.feature import MEGATRON_ON_NPU, VERL_ON_MEGATRON_CORE

PARALLEL_STATE = "megatron.core.parallel_state"
LAYER_SPECS = "megatron.core.models.gpt.gpt_layer_specs"


@demonstrates("megatron.core.jit:jit_fuser", MEGATRON_ON_NPU)
def functions_stay_as_they_are(body):
    return body(Upstream(), "function")


@demonstrates("megatron.core", MEGATRON_ON_NPU)
def torch_cuda_is_sent_to_the_npu(body):
    imported = []

    class Contrib(ModuleType):
        def __getattr__(self, name):
            imported.append(name)
            return None

    device = ModuleType("verl.utils.device")
    verl, utils = ModuleType("verl"), ModuleType("verl.utils")
    verl.utils, utils.device = utils, device
    verl.__spec__ = ModuleSpec("verl", loader=None)  # makes it look installed
    modules = {"verl": verl, "verl.utils": utils, "verl.utils.device": device}
    with mock.patch.dict("sys.modules", modules | {"torch_npu.contrib": Contrib("torch_npu.contrib")}):
        body()
    return "transfer_to_npu" in imported


@demonstrates("megatron.core.tensor_parallel.random:_set_cuda_rng_state", MEGATRON_ON_NPU)
def generators_are_those_of_the_npu(body):
    with mock.patch("torch.cuda.default_generators", ()):
        return body(lambda: len(torch.cuda.default_generators) == torch.npu.device_count())


@demonstrates("apex.optimizers", MEGATRON_ON_NPU)
def adam_is_torchs(body):
    return body("apex.optimizers").FusedAdam is torch.optim.AdamW


def type_name_of_npu_tensor(body):
    """Return the type of an NPU tensor as Megatron reads it."""
    return body(lambda: torch.ones(1, device="npu").type())


for target in (
    "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
    "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
):
    demonstrates(target, MEGATRON_ON_NPU)(type_name_of_npu_tensor)


@demonstrates(f"{LAYER_SPECS}:get_gpt_decoder_block_spec", VERL_ON_MEGATRON_CORE)
def layers_are_ours(body):
    with mock.patch("post_training.models.megatron.packed_layer_specs.packed_block_spec", return_value="ours"):
        return body(None)(None)


@demonstrates(f"{LAYER_SPECS}:get_gpt_mtp_block_spec", VERL_ON_MEGATRON_CORE)
def there_are_no_layers_for_multi_token_prediction(body):
    try:
        return body(None)()
    except ValueError as error:
        return str(error)


@demonstrates("megatron.core.models.gpt.gpt_model:GPTModel.__init__", VERL_ON_MEGATRON_CORE)
def an_empty_option_is_left_out(body):
    upstream = Upstream()
    body(upstream, None, mtp_block_spec=None)
    return upstream.options


@demonstrates("megatron.core.packed_seq_params:PackedSeqParams.__init__", VERL_ON_MEGATRON_CORE)
def padded_bounds_are_kept(body):
    params, upstream = SimpleNamespace(), Upstream()
    body(upstream, params, cu_seqlens_q_padded=1, cu_seqlens_kv_padded=2)
    return vars(params), upstream.options


@demonstrates("megatron.core.transformer.transformer_config:TransformerConfig.__init__", VERL_ON_MEGATRON_CORE)
def later_fields_have_neutral_values(body):
    config, upstream = SimpleNamespace(tensor_model_parallel_size=1), Upstream()
    body(upstream, config, expert_tensor_parallel_size=1)
    return sorted(vars(config)), upstream.options


def answer_of_tensor_parallelism(body):
    """Return the result of the added function of expert tensor parallelism."""
    names = ("world_size", "rank", "group")
    tensor_parallel = {f"get_tensor_model_parallel_{name}": f"tensor parallel {name}".title for name in names}
    return body(SimpleNamespace(**tensor_parallel))()


for name in ("world_size", "rank", "group"):
    demonstrates(f"{PARALLEL_STATE}:get_expert_tensor_parallel_{name}", VERL_ON_MEGATRON_CORE)(
        answer_of_tensor_parallelism
    )


@demonstrates(f"{PARALLEL_STATE}:initialize_model_parallel", VERL_ON_MEGATRON_CORE)
def the_same_expert_size_is_accepted(body):
    upstream = Upstream()
    body(upstream, 2, expert_tensor_parallel_size=2)
    return upstream.options


@demonstrates("megatron.core.transformer:MLATransformerConfig", VERL_ON_MEGATRON_CORE)
def the_name_is_there(body):
    with mock.patch(
        "post_training.models.megatron.deepseek_v3_config.DeepseekV3TransformerConfig", return_value="ours"
    ):
        return body(None)(q_lora_rank=4)


@demonstrates("megatron.core.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy", CHUNKED_LOG_PROBS)
def log_probs_come_from_hidden_states(body):
    labels = torch.tensor([[1, 2]])
    logits = DeferredLogits(torch.zeros(1, 2, 3), torch.zeros(4, 3), labels, None, 1)
    with mock.patch.object(DeferredLogits, "_compute", return_value=(torch.tensor([[-1.0, -2.0]]), None)):
        return str(body(lambda logits, target: "upstream", logits, labels))
