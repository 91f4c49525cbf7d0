"""What is not emulated says so; it never passes for done."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # noqa: F401
import torch_npu

from npu_emulator import coverage


def test_counting_floating_point_operations_is_refused():
    with pytest.raises(NotImplementedError, match="FlopsCounter"):
        torch_npu.utils.FlopsCounter().start()


def test_an_operator_that_is_not_emulated_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="npu_no_such_operator"):
        torch_npu.npu_no_such_operator()


@pytest.mark.parametrize("name", ["npu_ciou", "_npu_quant_rms_norm", "atb.npu_mla_preprocess", "atb._npu_group_topk"])
def test_operators_of_the_real_torch_npu_are_refused_by_name_wherever_they_are_looked_up(name):
    holder, _, short = name.rpartition(".")
    refuse = getattr(torch_npu.atb if holder else torch_npu, short)
    with pytest.raises(NotImplementedError, match=f"torch_npu.{name} is not emulated"):
        refuse()
    namespace = "npu" if name == "npu_ciou" else "atb"
    with pytest.raises(NotImplementedError, match=f"torch.ops.{namespace}.{short} is not emulated"):
        getattr(getattr(torch.ops, namespace), short)()


def test_every_operator_of_the_catalogue_is_emulated_or_refused():
    for full in coverage.catalogue():
        namespace, name = full.split("::")
        assert callable(getattr(torch_npu.atb if namespace == "atb" else torch_npu, name))
        assert callable(getattr(getattr(torch.ops, namespace), name))


def test_memory_is_not_shared_with_other_processes():
    """The page of memory sharing (IPC) is of a later version; until then torch's own answer is that of torch_npu."""
    with pytest.raises(RuntimeError, match="only available on CPU"):
        ForkingPickler.dumps(torch.ones(2, device="npu"))


def test_names_that_no_torch_npu_has_stay_unknown():
    assert not hasattr(torch_npu, "no_such_thing") and not hasattr(torch_npu.atb, "no_such_thing")
