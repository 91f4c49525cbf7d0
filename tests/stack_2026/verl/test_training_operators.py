"""Operators that trainers of 2026 reach match plain torch in float64, and reject what their documents forbid."""

import pytest
import torch
import torch_npu
from torch import Tensor
from torch.nn import functional

from tests.npu_emulator.operators.compare import assert_like_reference, refused

ROWS, CLASSES, IGNORED = 7, 11, -100


def targets() -> Tensor:
    """Draw a class for each row, with one ignored row."""
    drawn = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    drawn[2] = IGNORED
    return drawn


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_and_its_gradient_are_torchs(reduction, weighted, smoothing):
    logits, target = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(2)), targets()
    weight = torch.rand(CLASSES) + 0.5 if weighted else None

    def fused(given: Tensor) -> Tensor:
        own = None if weight is None else weight.to("npu")
        return torch_npu.npu_cross_entropy_loss(
            given, target.to("npu"), own, reduction=reduction, ignore_index=IGNORED, label_smoothing=smoothing
        )[0].squeeze()

    def plain(given: Tensor) -> Tensor:
        own = None if weight is None else weight.double()
        return functional.cross_entropy(
            given, target, own, reduction=reduction, ignore_index=IGNORED, label_smoothing=smoothing
        )

    assert_like_reference(fused, plain, [logits])


def test_cross_entropy_returns_log_probabilities():
    logits = torch.randn(ROWS, CLASSES, dtype=torch.bfloat16)
    _, found, _, _ = torch_npu.npu_cross_entropy_loss(logits.to("npu"), targets().to("npu"), reduction="none")
    torch.testing.assert_close(found.cpu().float(), logits.float().log_softmax(-1), rtol=0.02, atol=0.02)


def test_cross_entropy_of_an_unknown_class_rejected():
    logits = torch.randn(ROWS, CLASSES, device="npu")
    with refused("a target is outside the 11 classes"):
        torch_npu.npu_cross_entropy_loss(logits, torch.full((ROWS,), CLASSES, device="npu"), reduction="none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lse_square_scale_for_zloss": 0.5}, "lseSquareScaleForZloss must be 0"),
        ({"label_smoothing": 1.0}, "labelSmoothing must be at least 0 and less than 1"),
    ],
)
def test_cross_entropy_outside_its_document_rejected(options, words):
    logits = torch.randn(ROWS, CLASSES, device="npu")
    with refused(words):
        torch_npu.npu_cross_entropy_loss(logits, targets().to("npu"), reduction="none", **options)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_are_concatenated_as_torch_does(chunks):
    tensors = [torch.randn(shape) for shape in ((5, 2), (1,), (4, 3, 2))]
    found = torch._chunk_cat([tensor.to("npu") for tensor in tensors], 0, chunks)
    assert torch.equal(found.cpu(), torch._chunk_cat(tensors, 0, chunks))
