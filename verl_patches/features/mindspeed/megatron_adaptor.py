"""Applies MindSpeed-LLM's changes to Megatron, late and for verl's configuration, under the overlay's patches."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import overlay
from overlay.aliases import Replacement, copies, modules_of
from verl_patches.features.mindspeed.kernel_cache import kept_kernels

_CHANGED = ("megatron", "verl")


def start_for(config: Mapping[str, Any], settings: Any) -> None:
    """Start MindSpeed-LLM for verl's `actor_rollout_ref` node, once per process; do nothing for models it cannot build.

    Args:
        config: verl's node.
        settings: the overlay's active settings.
    """
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    from post_training.models.families import find_family
    from verl_patches.features.mindspeed.arguments import command_line, translate
    from verl_patches.features.precision.dtypes import run_dtype

    hf_config = AutoConfig.from_pretrained(copy_to_local(config["model"]["path"]))
    family = find_family(hf_config)
    if family is not None and family.mindspeed is not None:
        words = command_line(translate(config, hf_config, settings))
        start(words, run_dtype(settings.precision))


def start(words: Sequence[str], dtype: torch.dtype) -> None:
    """Let MindSpeed-LLM change Megatron for these arguments, once per process; later calls do nothing.

    It must come before Megatron's parallel groups and may come after Megatron's import: its changes are then also made
    in copies that were imported under other names, which MindSpeed does not look for.
    """
    if "mindspeed_llm.tasks.megatron_adaptor" in sys.modules:
        return
    with overlay.unpatched(), _command_line(words), _own_compiler(), kept_kernels():
        import mindspeed_llm.tasks.megatron_adaptor  # noqa: F401  (it acts on import, by sys.argv)

        rebind_copies()
        _find_fused_gradient_accumulation()
        _set_arguments(dtype)


def rebind_copies() -> list[str]:
    """Replace originals that Megatron and verl still hold by MindSpeed's functions and classes; return the places."""
    from mindspeed_llm.tasks.megatron_adaptor import MegatronAdaptation

    from mindspeed.patch_utils import MindSpeedPatchesManager

    patches = [*MindSpeedPatchesManager.patches_info.values(), *MegatronAdaptation._patch_info_collection.values()]
    replaced = [
        Replacement(patch.orig_func, getattr(patch.orig_module, patch.orig_func_name))
        for patch in patches
        if callable(patch.orig_func) and not isinstance(patch.orig_module, type) and patch.orig_module is not torch
    ]
    found = copies((each for each in replaced if each.old is not each.new), modules_of(_CHANGED), _CHANGED)
    for copy in found:
        copy.rebind()
    return [copy.site for copy in found]


def _find_fused_gradient_accumulation() -> None:
    """Give Megatron the module that it looks for on import, which may have been before MindSpeed provided it."""
    import fused_weight_gradient_mlp_cuda
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = fused_weight_gradient_mlp_cuda
    layers._grad_accum_fusion_available = True


def _set_arguments(dtype: torch.dtype) -> None:
    from megatron.training import arguments, global_vars

    args = arguments.parse_args()
    arguments.validate_args(args, {})
    # Megatron rejects grouped GEMM in types other than bfloat16 only when it validates arguments, so set them after.
    args.bf16, args.params_dtype = dtype is torch.bfloat16, dtype
    global_vars.set_args(args)


@contextmanager
def _command_line(words: Sequence[str]) -> Iterator[None]:
    """Put `words` into ``sys.argv``, which MindSpeed-LLM reads on import."""
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _own_compiler() -> Iterator[None]:
    """Restore ``torch.compile``, which MindSpeed replaces for the whole process: the rollout in it compiles graphs."""
    before = torch.compile
    try:
        yield
    finally:
        torch.compile = before
