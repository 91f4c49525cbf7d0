"""Check whether tensors are finite, with operators whose handling of inf and NaN is documented."""

from __future__ import annotations

import torch

from post_training.tensor_parts import parts_of

CHECKED_ELEMENTS = 2**26
"""Elements of one check: its masks, and the absolute values that torch's own formula makes, take at most 0.5 GiB."""


def all_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether no element is inf or nan: a bool without dimensions, on the tensor's device.

    `isfinite` and `all` are documented for every value. Only torch documents that `max` and `min` propagate NaN; on a
    device where they do not, a NaN beside ordinary numbers would pass.
    """
    finite = torch.ones((), dtype=torch.bool, device=tensor.device)
    for part in parts_of(tensor.detach(), CHECKED_ELEMENTS):
        finite.logical_and_(torch.isfinite(part).all())
    return finite
