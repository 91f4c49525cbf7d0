"""The tokens of a micro batch that have a value: those of the answers.

The value at token t is that of the state in which t is chosen, so an answer of l tokens has l values. The cluster's
commit of verl shifts the mask by one token, and so counts a value after the last token: the loss has an extra term, and
the advantage of the last token rests on the prediction for a state with no further choice. For an answer of 2 tokens
after a prompt of 3, in a width of 4, the attention mask is 111 1100: the answer's mask is 1100, and verl's was 1110.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from post_training.process_context import process_context


def response_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the mask of answer tokens [rows, response length], from `attention_mask` and `responses`."""
    return batch["attention_mask"][:, -batch["responses"].size(1) :]


def values_of_tokens(values: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return `values` [rows, response length] in float32, 0 at positions without an answer token."""
    return values.float() * response_mask(batch).to(values.device)


class LastForward:
    """The last micro batch that the critic of this process has passed through its model."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None

    def hold(self, mask: torch.Tensor) -> None:
        """Keep its mask [rows, response length]."""
        self._mask = mask

    def mask(self, given: torch.Tensor) -> torch.Tensor:
        """Return the mask for its loss; `given` if there has been no forward yet."""
        return given if self._mask is None else self._mask


def last_forward() -> LastForward:
    """Return this process's last forward."""
    return process_context().of(LastForward)
