"""Which tokens of a micro batch have a value: those of the answers.

The value at token t is that of the state in which t is chosen, so an answer of l tokens has l of them. verl's commit of
the cluster masks with what lies one token before, and so takes in a value after the last token: the loss has a term
more, and the advantage of the last token rests on a prediction where nothing comes any more. Of an answer of 2 tokens
after a prompt of 3 in a width of 4, the attention mask is 111 1100: the answer's is 1100, and verl's was 1110.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from post_training.process_context import process_context


def response_mask(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[rows, response length]: the tokens of answers, out of `attention_mask` and `responses`."""
    return batch["attention_mask"][:, -batch["responses"].size(1) :]


def values_of_tokens(values: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`values` [rows, response length] in float32, 0 where there is no token of an answer."""
    return values.float() * response_mask(batch).to(values.device)


class LastForward:
    """The micro batch that the critic of this process has put through its model last."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None

    def hold(self, mask: torch.Tensor) -> None:
        """Keep its mask [rows, response length]."""
        self._mask = mask

    def mask(self, given: torch.Tensor) -> torch.Tensor:
        """The mask for its loss; `given` where there has been none."""
        return given if self._mask is None else self._mask


def last_forward() -> LastForward:
    """That of this process."""
    return process_context().of(LastForward)
