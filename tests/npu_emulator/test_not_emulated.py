"""Functions that are not emulated raise an error; they never pretend to succeed."""

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # noqa: F401
import torch_npu

from tests.npu_emulator.operators.compare import refused


def attention(x: torch.Tensor, **options) -> None:
    x = x.half()
    options |= {"scale_value": 1.0, "num_heads": 1, "num_kv_heads": 1, "kernel_type": 0, "out": torch.empty_like(x)}
    torch_npu.atb._npu_flash_attention_v2(x, x, x, [4], **options)


def paged_attention(x: torch.Tensor, **options) -> None:
    x, blocks = x.half(), torch.zeros(4, 1, dtype=torch.int32, device="npu")
    cache = x.view(1, 4, 1, 4)
    options |= {"scale_value": 1.0, "num_heads": 1, "num_kv_heads": 1, "value_cache": cache, "out": torch.empty_like(x)}
    torch_npu.atb._npu_paged_attention_v2(x, cache, blocks, [1, 2, 3, 4], **options)


# One for each way in which torch_npu reaches the kernels of a device.
NOT_EMULATED: dict[str, Callable[[torch.Tensor], object]] = {
    "aclnnPdist is not emulated; it was called with self:Tensor=Float": torch.nn.functional.pdist,
    "the aclop operator CIoU is not emulated; its inputs are": lambda x: torch_npu.npu_ciou(x, x, True, False, 0),
    "QuantRmsNormOperation CreateOperation failed": lambda x: torch_npu._npu_quant_rms_norm(x, *[x[0]] * 5, 1e-6),
    "AtbMLAPreprocess": lambda x: torch_npu.atb.npu_mla_preprocess(*[x] * 16),
}


@pytest.mark.parametrize("words", NOT_EMULATED)
def test_unknown_operator_rejected_and_process_continues(words):
    x = torch.ones(4, 4, device="npu")
    with refused(words):
        NOT_EMULATED[words](x)
    assert (x + x).sum().item() == 32


@pytest.mark.parametrize(("call", "emulated"), [(attention, 1), (paged_attention, 0)])
def test_parameters_that_change_a_result_rejected_by_name(call, emulated, capfd):
    """A mask of slopes. op-plugin's error names the operation alone, and a line on standard error says why."""
    x = torch.ones(4, 4, device="npu")
    with refused("AttentionOperation CreateOperation failed"):
        call(x, mask_type=2, mask=x.half())
    assert "AttentionOperation: maskType 2 is not emulated" in capfd.readouterr().err
    call(x, mask_type=emulated, mask=x.half())
    assert (x + x).sum().item() == 32


def test_memory_is_not_shared_with_other_processes():
    """The page of memory sharing (IPC) is of a later version; until then torch's own answer is that of torch_npu."""
    with pytest.raises(RuntimeError, match="only available on CPU"):
        ForkingPickler.dumps(torch.ones(2, device="npu"))
