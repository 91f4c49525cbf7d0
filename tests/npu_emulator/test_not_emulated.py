"""What is not emulated says so; it never passes for done."""

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # noqa: F401
import torch_npu

from tests.npu_emulator.operators.compare import refused

# One for each way in which torch_npu reaches the kernels of a device.
NOT_EMULATED: dict[str, Callable[[torch.Tensor], object]] = {
    "aclnnPdist is not emulated; it was called with self:Tensor=Float": torch.nn.functional.pdist,
    "the aclop operator CIoU is not emulated; its inputs are": lambda x: torch_npu.npu_ciou(x, x, True, False, 0),
    "QuantRmsNormOperation CreateOperation failed": lambda x: torch_npu._npu_quant_rms_norm(x, *[x[0]] * 5, 1e-6),
    "AtbMLAPreprocess": lambda x: torch_npu.atb.npu_mla_preprocess(*[x] * 16),
}


@pytest.mark.parametrize("words", NOT_EMULATED)
def test_an_operator_is_refused_by_name_and_the_process_goes_on(words):
    x = torch.ones(4, 4, device="npu")
    with refused(words):
        NOT_EMULATED[words](x)
    assert (x + x).sum().item() == 32


def test_memory_is_not_shared_with_other_processes():
    """The page of memory sharing (IPC) is of a later version; until then torch's own answer is that of torch_npu."""
    with pytest.raises(RuntimeError, match="only available on CPU"):
        ForkingPickler.dumps(torch.ones(2, device="npu"))
