"""The floating-point type of a run."""

from __future__ import annotations

import copy
from typing import Any

import torch


def run_dtype(precision: str) -> torch.dtype:
    """Return the torch type for `overlay.precision`."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[precision]


def as_if_half(model_config: Any) -> Any:
    """Return vLLM's model configuration, or if it is float32 a copy that claims bfloat16.

    vLLM's check for its V1 engine rejects float32 because its CUDA attention kernels are half precision; on an NPU the
    attention kernels come from vLLM-Ascend, so only this part of the check does not apply.
    """
    if model_config.dtype != torch.float32:
        return model_config
    stand_in = copy.copy(model_config)
    stand_in.dtype = torch.bfloat16
    return stand_in


def optimizer_in_float32(optimizer_config: Any) -> Any:
    """Set Megatron's optimizer configuration to float32 parameters, in place, and return it."""
    optimizer_config.bf16 = False
    optimizer_config.fp16 = False
    optimizer_config.params_dtype = torch.float32
    return optimizer_config


def sharded_in_float32(fsdp_config: Any) -> Any:
    """Return a copy of verl's `fsdp_config` (a DictConfig) under which weights, gradients and buffers are float32."""
    from omegaconf import OmegaConf

    values = OmegaConf.to_container(fsdp_config, resolve=True)
    assert isinstance(values, dict)
    mixed = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    return OmegaConf.create(values | {"model_dtype": "fp32", "mixed_precision": mixed})
