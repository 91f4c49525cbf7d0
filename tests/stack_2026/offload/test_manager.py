"""For random orders of verl's calls, the right parameters are on the die, with the right values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401  (which loads torch_npu, and restores what that changes)
from hypothesis import given
from hypothesis import strategies as st

from post_training.process_context import process_context
from verl_plugin.offload.manager import OffloadManager, StayingEngines


class UpstreamEngine:
    """A stand-in for verl's engine, whose parameters are one number, on the die, on the host or on both."""

    def __init__(self, value: int, adapters: int = 0) -> None:
        self.die: int | None = None
        self.host: int | None = value
        self.mode: str | None = None
        self.model_config: Any = SimpleNamespace(lora_rank=adapters, lora={})
        self.optimizer_on_die = self.gradients_on_die = False
        self.copies = 0

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        assert device in ("cpu", "npu")
        if model and device == "npu" and self.die is None:
            self.die, self.copies = self.host, self.copies + 1
            self.host = None
        elif model and device == "cpu" and self.die is not None:
            self.host, self.die, self.copies = self.die, None, self.copies + 1
        if optimizer:
            self.optimizer_on_die = device == "npu"
        if grad and model:
            self.gradients_on_die = device == "npu"

    @contextmanager
    def _context(self, mode: str, disable_auto_offload: bool = False) -> Iterator[None]:
        moves = () if disable_auto_offload else ("npu", "cpu")
        for device in moves[:1]:
            self.to(device, True, mode == "train", mode == "train")
        self.mode = mode
        try:
            yield
        finally:
            for device in moves[1:]:
                self.to(device, True, mode == "train", mode == "train")
            self.mode = None

    def train_mode(self, **named: Any) -> Any:
        return self._context("train", **named)

    def eval_mode(self, **named: Any) -> Any:
        return self._context("eval", **named)

    def get_per_tensor_param(self, **_: Any) -> int | None:
        self.to("npu", True, False, False)
        return self.die

    def save_checkpoint(self) -> None:
        self.to("npu", True, False, False)
        self.saved = self.die
        self.to("cpu", True, False, False)

    def load_checkpoint(self, value: int) -> None:
        self.to("npu", True, False, False)
        self.die = value
        self.to("cpu", True, True, False)


class Engine(OffloadManager, UpstreamEngine):
    """An engine that keeps the host's copy as long as `OffloadManager` considers it valid."""

    def _arrive(self) -> None:
        if self.die is None:
            self._host = self.host

    def _drop(self) -> bool:
        if self._host is None:
            return False
        self.host, self.die = self._host, None
        return True

    def _release_gradients(self) -> None:
        self.gradients_on_die = False


@pytest.fixture(autouse=True)
def no_engines_stay() -> Iterator[None]:
    process_context().keep(StayingEngines())
    yield
    process_context().keep(StayingEngines())


OPERATIONS = ("update", "log-probs", "reference", "offer", "save", "load")


@given(st.lists(st.sampled_from(OPERATIONS), max_size=12), st.booleans())
def test_parameters_have_the_values_of_the_last_writer(asked, adapters):
    """Check any order: the reference's never change, and during a pass no other engine's are on the die."""
    process_context().keep(StayingEngines())
    actor, reference, written = Engine(1, int(adapters)), Engine(-1), 1
    for number, operation in enumerate(asked, 2):
        if operation == "update":
            with actor.train_mode():
                assert (actor.die, reference.die) == (written, None)
                assert actor.optimizer_on_die and actor.gradients_on_die
                with actor.train_mode(disable_auto_offload=True):  # of a mini batch
                    actor.die = written = number
            assert (actor.die, actor.host) == (number, None), "it stays, without a copy"
        elif operation == "log-probs":
            with actor.eval_mode():
                assert (actor.die, reference.die) == (written, None)
        elif operation == "reference":
            with reference.eval_mode():
                assert (actor.die, reference.die) == (None, -1)
        elif operation == "offer":
            assert actor.get_per_tensor_param() == written and reference.die is None
            actor.to("cpu", model=True, optimizer=False, grad=False)
            assert (actor.die, reference.die) == (None, None)
        elif operation == "save":
            actor.save_checkpoint()
            assert (actor.saved, actor.die, reference.die) == (written, None, None)
        else:
            actor.load_checkpoint(written := 100 + number)
            assert actor.die is None
        assert not actor.optimizer_on_die and not actor.gradients_on_die
    assert actor.get_per_tensor_param() == written


def test_unwritten_parameters_leave_without_a_copy():
    actor = Engine(1)
    for _ in range(3):
        with actor.eval_mode():
            pass
        actor.to("cpu", model=True, optimizer=False, grad=False)
    assert actor.copies == 3 + 1, "each arrival and the first departure, before which the host has no known copy"
    with actor.train_mode():
        actor.die = 2
    with actor.eval_mode():
        assert actor.die == 2
    actor.to("cpu", model=True, optimizer=False, grad=False)
    assert actor.host == 2


def test_parameters_stay_until_another_engine_begins():
    actor, reference = Engine(1), Engine(-1)
    with actor.eval_mode():
        pass
    assert actor.die == 1 and process_context().of(StayingEngines) == [actor]
    with reference.eval_mode():
        assert actor.die is None
    with reference.eval_mode():
        pass
    assert reference.die == -1 and process_context().of(StayingEngines) == [reference]


def test_parameters_leave_after_a_pass_that_failed():
    actor = Engine(1)
    with (
        pytest.raises(ValueError, match="out of range"),
        actor.train_mode(),
        actor.train_mode(disable_auto_offload=True),
    ):
        raise ValueError("index out of range")
    actor.to("cpu", model=True, optimizer=False, grad=False)
    assert (actor.die, actor.host) == (None, 1) and process_context().of(StayingEngines) == []
