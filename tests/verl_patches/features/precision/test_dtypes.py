from types import SimpleNamespace

import torch

from verl_patches.features.precision.dtypes import as_if_half, optimizer_in_float32, run_dtype


def test_names():
    assert run_dtype("bfloat16") is torch.bfloat16 and run_dtype("float32") is torch.float32


def test_the_stand_in_differs_in_nothing_but_its_dtype():
    config = SimpleNamespace(dtype=torch.float32, task="generate")
    stand_in = as_if_half(config)
    assert stand_in.dtype is torch.bfloat16 and stand_in.task == "generate"
    assert config.dtype is torch.float32
    half = SimpleNamespace(dtype=torch.float16)
    assert as_if_half(half) is half


def test_optimizer_configuration():
    config = SimpleNamespace(bf16=True, fp16=False, params_dtype=torch.bfloat16, lr=1.0)
    assert optimizer_in_float32(config) is config
    assert (config.bf16, config.params_dtype, config.lr) == (False, torch.float32, 1.0)
