"""The list of operators that the pinned code bases reach agrees with their sources."""

import importlib.util
from pathlib import Path

import pytest

from tests.upstream import operator_scan
from tests.upstream.operator_scan import CodeBase, scan

SOURCES = {
    "begin.py": "import small.used\nFACTORY = 'small.named:Thing'\nif False:\n    import small.quantised.weights\n",
    "used.py": """
import torch, torch_npu
class Layer:
    def forward(self, x):
        return torch_npu.npu_swiglu(torch.ops.npu.npu_rms_norm(x), torch_npu.atb.npu_ring_mla, torch_npu.npu.Stream())
    def gather(self):
        return builder().load().npu_gmm(torch_npu._npu_flash_attention)
torch.ops._C.rms_norm = args.npu_gmm
""",
    "named.py": "class Thing:\n    step = torch_npu.npu_new_thing\n",
    "quantised/weights.py": "torch_npu.npu_quant_matmul()\ntorch_npu.npu_swiglu()\n",
    "unused.py": "torch_npu.npu_mish()\n",
    "ops/csrc/cann/gmm.cpp": 'm.def("npu_gmm", &npu_gmm);',
}


@pytest.fixture
def small(tmp_path) -> Path:
    """Return a code base whose files each have one reason for an operator to count and one against it."""
    for name, text in SOURCES.items():
        file = tmp_path / "base" / "small" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_places_count_when_they_are_imported_read_and_not_outside(small, monkeypatch):
    monkeypatch.setitem(operator_scan.OUTSIDE, "small/quantised/", "quantised weights")
    found = scan(small, [CodeBase("base", "small", ("small.begin",))])
    used = "base small/used.py"
    assert found["reached"] == {
        "atb::_npu_flash_attention": [used],
        "atb::npu_ring_mla": [used],
        "npu::npu_new_thing": ["base small/named.py"],
        "npu::npu_rms_norm": [used],
        "npu::npu_swiglu": [used],
        "npu_extension::npu_gmm": [used],
    }
    assert found["elsewhere"] == {"npu::npu_quant_matmul": ["quantised weights"]}


def test_a_function_can_be_outside(small, monkeypatch):
    monkeypatch.setitem(operator_scan.OUTSIDE, "small/used.py:Layer.forward npu::npu_swiglu", "nobody")
    reached = scan(small, [CodeBase("base", "small", ("small.used",))])["reached"]
    assert "npu::npu_swiglu" not in reached and "npu::npu_rms_norm" in reached


def listed(base: str) -> dict[str, list[str]]:
    """Return the list's part for one code base."""
    return {
        name: own
        for name, places in operator_scan.reached_operators()["reached"].items()
        if (own := [place for place in places if place.split()[0] == base])
    }


def link_installed(folder: Path) -> CodeBase:
    """Link the installed vllm-ascend into a folder, in place of a checkout of its release."""
    package = Path(importlib.util.find_spec("vllm_ascend").origin).parent
    (base,) = (base for base in operator_scan.CODE_BASES if base.checkout == "vllm-ascend-0.9.1")
    (folder / base.checkout).symlink_to(package.parent)
    return base


def test_the_list_is_what_the_installed_vllm_ascend_says(tmp_path):
    base = link_installed(tmp_path)
    found = scan(tmp_path, [base])["reached"]
    assert len(found) > 30 and found == listed(base.checkout)


def test_the_list_is_what_this_repository_says(tmp_path):
    found = scan(tmp_path, [], own=True)["reached"]
    assert "npu::npu_grouped_matmul_add_" in found and found == listed(operator_scan.OVERLAY)


@pytest.mark.slow
def test_the_list_is_what_the_checkouts_say(upstream, tmp_path):
    others = {base.checkout for base in operator_scan.CODE_BASES} - {link_installed(tmp_path).checkout}
    for checkout in others:
        assert (upstream / checkout).is_dir(), f"{upstream} lacks {checkout}"
        (tmp_path / checkout).symlink_to(upstream / checkout)
    found = scan(tmp_path, own=True)
    assert found == operator_scan.reached_operators()
    assert "npu::npu_rms_norm" in found["reached"] and "npu::npu_quantize" in found["elsewhere"]
