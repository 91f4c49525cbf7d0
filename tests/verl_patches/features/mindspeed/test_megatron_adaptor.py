"""MindSpeed's replacements also reach the copies that Megatron and verl hold; both are stand-ins here."""

import sys
from types import ModuleType, SimpleNamespace

import torch

from verl_patches.features.mindspeed.megatron_adaptor import rebind_copies


def module(monkeypatch, name, **contents):
    made = ModuleType(name)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def patch(holder, name, old):
    return SimpleNamespace(orig_module=holder, orig_func_name=name, orig_func=old)


def test_copies_of_functions_replaced_by_mindspeed_are_fixed(monkeypatch):
    def old():
        """Megatron's original."""

    def new():
        """MindSpeed's replacement."""

    def same():
        """A function that nobody replaced."""

    class Layer:
        forward = new

    home = module(monkeypatch, "megatron.made_up", work=new, same=same)
    copied = module(monkeypatch, "megatron.made_up_too", work=old, same=same)
    verls = module(monkeypatch, "verl.made_up", taken=old)
    other = module(monkeypatch, "elsewhere", taken=old)
    infos = {
        "work": patch(home, "work", old),
        "same": patch(home, "same", same),
        "method": patch(Layer, "forward", same),
        "torch": patch(torch, "compile", same),
        "constant": patch(home, "work", 3),
    }
    module(monkeypatch, "mindspeed")
    module(monkeypatch, "mindspeed.patch_utils", MindSpeedPatchesManager=SimpleNamespace(patches_info=infos))
    for name in ("mindspeed_llm", "mindspeed_llm.tasks"):
        module(monkeypatch, name)
    adaptation = SimpleNamespace(_patch_info_collection={})
    module(monkeypatch, "mindspeed_llm.tasks.megatron_adaptor", MegatronAdaptation=adaptation)

    assert sorted(rebind_copies()) == ["megatron.made_up_too:work", "verl.made_up:taken"]
    assert copied.work is new and verls.taken is new and other.taken is old and copied.same is same
    assert rebind_copies() == [], "nothing is left"

    infos.clear()
    adaptation._patch_info_collection["work"] = patch(home, "work", same)
    assert sorted(rebind_copies()) == ["megatron.made_up:same", "megatron.made_up_too:same"]
