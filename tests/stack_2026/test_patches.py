"""The patches of the stack 2026 fit the installed packages, and upstream fails without them."""

import json
import subprocess
import sys
from functools import partial, partialmethod

import pytest
import torch
import torch_npu  # noqa: F401

from overlay import check as checking
from overlay.discovery import load
from overlay.lock import Lock
from overlay.ordering import make_plan
from overlay.pins import PINS_FILE, Pins
from overlay.sources import Sources, installed
from tests.overlay import mutations, restating
from tests.overlay.conftest import REPOSITORY

PINS = Pins.read(stack="2026")
PATCHES = make_plan(load(PINS.patch_packages())).patches
LOCK = PINS_FILE.with_name(PINS.lock_name)
NAMED = pytest.mark.parametrize("patch", [pytest.param(patch, id=patch.label) for patch in PATCHES])

ROUTER = "megatron.core.transformer.moe.moe_utils:router_gating_linear"
MLA = "megatron.core.transformer.multi_latent_attention:HAVE_TE"
VERSION = "megatron.core.optimizer.optimizer_config:is_te_min_version"
TYPE = "torch._tensor:Tensor.type"


def source_of(module: str) -> bytes:
    return installed(PINS.of_module(module)).text(module)


def body_of(target: str):
    return next(patch.body for patch in PATCHES if patch.target == target)


def test_check_of_installed_packages_is_clean():
    command = [sys.executable, "-m", "overlay", "check", "--stack", "2026", "--json"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    verdicts = [verdict for part in json.loads(result.stdout)["checked"] for verdict in part["verdicts"]]
    assert {verdict["patch"] for verdict in verdicts} == {patch.label for patch in PATCHES}


@NAMED
def test_changed_target_detected(patch):
    content, applied = source_of(patch.module), 0
    for mutation, expected in mutations.EXPECTED.items():
        changed = mutations.mutated(content, patch.qualified_name, mutation)
        if changed is not None:
            alone = Sources("mutated", {patch.module: (changed, False)})
            verdicts = checking.check([patch], Lock.read(LOCK), PINS, PINS.of_module(patch.module), alone)
            assert {each.status for each in verdicts if each.target == patch.target} <= expected, mutation.__name__
            applied += 1
    assert applied or patch.module.startswith("torch."), "a member that torch's class inherits cannot be changed"


@NAMED
def test_no_patch_restates_its_target(patch):
    ours = restating.shapes((REPOSITORY / f"{patch.declared_in.replace('.', '/')}.py").read_text())
    shared = restating.longest_shared_run(ours, restating.shapes(source_of(patch.module).decode()))
    assert len(shared) < 6, shared


@pytest.fixture
def moe_utils():
    """Megatron-core's unpatched module: nothing in this process activates the overlay."""
    from megatron.core.transformer.moe import moe_utils

    return moe_utils


def test_router_fails_without_the_patch(moe_utils):
    with pytest.raises(NameError, match="te_general_gemm"):
        moe_utils.router_gating_linear(torch.ones(2, 4), torch.ones(3, 4), None, torch.float32)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_router_equals_upstreams_own_product(moe_utils, monkeypatch, dtype, has_bias):
    """Compare with upstream's branch without TransformerEngine, reached by defining the missing name."""
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 8), (3, 8), (3,))]
    results = []
    for gate in (moe_utils.router_gating_linear, partial(body_of(ROUTER), moe_utils.router_gating_linear)):
        inputs = [each.clone().requires_grad_() for each in drawn[: 3 if has_bias else 2]]
        logits = gate(inputs[0], inputs[1], inputs[2] if has_bias else None, torch.float32)
        logits.square().sum().backward()
        results.append([logits, *(each.grad for each in inputs)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)  # types too


def test_mla_sees_that_transformer_engine_is_missing():
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention

    assert multi_latent_attention.HAVE_TE and not transformer_engine.HAVE_TE
    assert body_of(MLA)(multi_latent_attention.HAVE_TE) is False


ON_HOST = {
    "optimizer": "adam", "lr": 1e-6, "use_distributed_optimizer": True, "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
}  # fmt: skip


def test_no_transformer_engine_is_older_than_any_version(monkeypatch):
    """An optimizer on the host needs no TransformerEngine, and keeps full float32 weights."""
    from megatron.core import utils
    from megatron.core.optimizer import OptimizerConfig, optimizer_config

    with pytest.raises(TypeError, match="'>=' not supported"):
        OptimizerConfig(**ON_HOST)
    body = partial(body_of(VERSION), optimizer_config.is_te_min_version)
    monkeypatch.setattr(optimizer_config, "is_te_min_version", body)
    config = OptimizerConfig(**ON_HOST)
    assert not config.store_param_remainders and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for installed_version, newer in (("2.0.0", False), ("2.2.0", True)):
        monkeypatch.setattr(utils, "_te_version", utils.PkgVersion(installed_version))
        assert body("2.1.0") is newer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_on_the_npu_have_cudas_names(dtype):
    tensor, host = torch.ones(2, device="npu", dtype=dtype), torch.ones(2, dtype=dtype)
    body = body_of(TYPE)
    assert tensor.type().startswith("torch.npu.")
    assert body(torch.Tensor.type, tensor) == tensor.type().replace("npu", "cuda")
    assert body(torch.Tensor.type, host) == host.type()
    assert body(torch.Tensor.type, host, torch.float64).dtype == torch.float64


def test_gradient_clipping_takes_parameters_of_the_npu(monkeypatch):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    weight = torch.nn.Parameter(torch.ones(4, device="npu"))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(AssertionError):
        clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=0.5)
    monkeypatch.setattr(torch.Tensor, "type", partialmethod(partial(body_of(TYPE), torch.Tensor.type)))
    clip_grad_by_total_norm_fp32([weight], max_norm=1.0, total_norm=0.5)
