"""The vllm-ascend patch series applies to the release that stands in for the pin, and has its documented effect."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.npu_emulator.operators.compare import refused

ROOM = Path(__file__).parents[2] / "vllm_ascend_patches"
PATCHES = [line for line in (ROOM / "series").read_text().splitlines() if line and not line.startswith("#")]
MODULE = "vllm_ascend/attention/mla_v1.py"
HEADS, LATENT, ROPE, BLOCK = 1, 512, 64, 4  # the kernel supports only DeepSeek's sizes


def header(patch: str) -> dict[str, str]:
    """Return the header fields before the first diff, by name."""
    text = (ROOM / patch).read_text().split("\n---\n")[0]
    return dict(re.findall(r"^([A-Z][\w-]+): ?(.*(?:\n .*)*)", text, re.MULTILINE))


def test_the_series_names_every_patch_in_order():
    assert PATCHES == sorted(path.name for path in ROOM.glob("*.patch")) and PATCHES


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_says_what_it_is_for_and_where_it_stands(patch):
    assert {"Description", "Origin", "Forwarded", "Last-Update", "Applies-To"} <= header(patch).keys()
    assert len((ROOM / patch).read_text().split("\n---\n")) == 2


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> Path:
    """Copy of the installed package's attention module with the series applied."""
    folder = tmp_path_factory.mktemp("patched")
    installed = Path(find_spec("vllm_ascend").submodule_search_locations[0])
    (folder / MODULE).parent.mkdir(parents=True)
    (folder / MODULE).write_text((installed.parent / MODULE).read_text())
    files = [str(ROOM / patch) for patch in PATCHES]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", *files], cwd=folder, env=environment, check=True)
    return folder / MODULE


def exec_kv_prefill(source: Path):
    """Return the method of that name, compiled by itself, because importing vllm-ascend would start all of vLLM."""
    import torch_npu

    found = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
    method = next(node for node in found if node.name == "exec_kv_prefill")
    names = {"torch": torch, "torch_npu": torch_npu, "Tuple": tuple}
    exec(compile(ast.Module([method], []), str(source), "exec"), names)
    return names["exec_kv_prefill"]


def installed_source() -> Path:
    return Path(find_spec("vllm_ascend").submodule_search_locations[0]).parent / MODULE


def prefill(source: Path, slots: list[int], private: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Let exec_kv_prefill write tokens to `slots` of an empty cache; return the cache by slot and the expected one."""
    torch.manual_seed(0)
    tokens = torch.randn(len(slots), LATENT + ROPE)
    this = SimpleNamespace(
        num_kv_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
        enable_kv_nz=private,
        kv_a_proj_with_mqa=lambda states: (states,),
        kv_a_layernorm=SimpleNamespace(weight=torch.ones(LATENT).npu(), variance_epsilon=1e-6),
    )
    latent, rope = (torch.zeros(3, BLOCK, HEADS, size).npu() for size in (LATENT, ROPE))
    cos, sin = torch.ones(len(slots), 1, 1, ROPE).npu(), torch.zeros(len(slots), 1, 1, ROPE).npu()
    exec_kv_prefill(source)(this, tokens.npu(), cos, sin, (latent, rope), torch.tensor(slots).npu())
    kept = latent.cpu()
    if private:
        kept = kept.view(3, HEADS, LATENT // 16, BLOCK, 16).permute(0, 3, 1, 2, 4)
    part = tokens[:, :LATENT]
    expected = part / (part.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return kept.reshape(3 * BLOCK, LATENT)[slots], expected


@pytest.mark.parametrize("private", [False, True])
def test_a_prefill_writes_every_token_to_its_slot(patched, private):
    found, expected = prefill(patched, [5, 6, 7, 2], private)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_without_the_patch_the_private_format_loses_tokens(monkeypatch):
    """The kernel's documentation forbids the call."""
    with refused("must name beginnings of blocks with this cacheMode"):
        prefill(installed_source(), [5, 6, 7, 2], True)
    monkeypatch.setenv("NPU_EMULATOR_STRICT", "0")
    found, expected = prefill(installed_source(), [5, 6, 7, 2], True)
    assert not torch.allclose(found, expected, atol=1e-2)


def second_writes(source: Path) -> int:
    """Return the number of cache writes that graph mode makes for a prefill without cached context."""
    body = (
        source.read_text()
        .split("        if self.torchair_graph_enabled:\n            if kv_cache[0]")[-1]
        .split("        else:")[0]
    )
    return body.count("PrefillNoCache")


def test_graph_mode_writes_a_prefill_once(patched):
    assert second_writes(patched) == 0 and second_writes(installed_source()) == 1
