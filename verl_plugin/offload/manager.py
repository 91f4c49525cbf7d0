"""Methods of verl's training engines that offload and reload their state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from verl.utils.device import get_torch_device

from post_training.process_context import process_context


class StayingEngines(list["OffloadManager"]):
    """Engines of this process whose parameters stayed on the die after a pass. Actor and reference are two engines."""


class OffloadManager:
    """Mixin that `extend_engine` puts before a training engine of verl.

    Gradients and the optimizer leave after each update, as in verl: the worker of the rollout, another process, takes
    its memory back before this process is called again. Parameters stay until another engine begins a pass, or until
    verl offloads them, which it does after the rollout has its weights and before the KV cache returns. Parameters that
    no update has written since they arrived release their memory without a copy.
    """

    model_config: Any
    module: Any
    _pass_ends = False
    _written = True
    _host: Any = None
    """Host copies of parameters that are on the die, which verl would drop; None once an update may write them."""

    def train_mode(self, **named: Any) -> Any:
        """As upstream, without the other engines' parameters."""
        self._begin()
        self._written, self._host = True, None
        return self._pass(super().train_mode(**named))  # type: ignore[misc]  # of the engine that this extends

    def eval_mode(self, **named: Any) -> Any:
        """As upstream, without the other engines' parameters."""
        self._begin()
        return self._pass(super().eval_mode(**named))  # type: ignore[misc]  # of the engine that this extends

    @contextmanager
    def _pass(self, context: Any) -> Iterator[None]:
        """Enter verl's context of a pass, which offloads at its end, and mark that end.

        verl's `mode` does not tell it: an update has a context for each mini batch within its own, and each resets it.
        """
        with ExitStack() as ending:
            ending.callback(setattr, self, "_pass_ends", False)
            ending.enter_context(context)
            ending.callback(setattr, self, "_pass_ends", True)
            yield

    def get_per_tensor_param(self, **named: Any) -> Any:
        """As upstream, without the other engines' parameters."""
        self._begin()
        return super().get_per_tensor_param(**named)  # type: ignore[misc]  # of the engine that this extends

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """As upstream, without the other engines' parameters. verl moves this engine's out afterwards."""
        self._begin()
        super().save_checkpoint(*arguments, **named)  # type: ignore[misc]  # of the engine that this extends

    def load_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """As upstream."""
        self._begin()
        self._written, self._host = True, None
        super().load_checkpoint(*arguments, **named)  # type: ignore[misc]  # of the engine that this extends

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """As upstream, except that parameters stay after a pass, and are copied to the host only if written.

        Args:
            device: `cpu`, or the device's type.
            model: move parameters.
            optimizer: move the optimizer's state.
            grad: move gradients; together with parameters alone.
        """
        if device != "cpu":
            if model and not self._written:
                self._arrive()
            super().to(device, model, optimizer, grad)  # type: ignore[misc]  # of the engine that this extends
        elif model and self._pass_ends:
            self._release_gradients()
            super().to("cpu", False, optimizer, False)  # type: ignore[misc]  # of the engine that this extends
            staying = process_context().of(StayingEngines)
            if self not in staying:
                staying.append(self)
        elif model:
            self._leave(optimizer, grad)
        else:
            super().to(device, model, optimizer, grad)  # type: ignore[misc]  # of the engine that this extends

    def _begin(self) -> None:
        """Offload the parameters of other engines."""
        for engine in [each for each in process_context().of(StayingEngines) if each is not self]:
            engine.to("cpu", model=True, optimizer=False, grad=False)

    def _leave(self, optimizer: bool, grad: bool) -> None:
        """Offload the parameters, copying them only if the host has no valid copy."""
        staying = process_context().of(StayingEngines)
        if self in staying:
            staying.remove(self)
        whole = not self._written and not _has_adapters(self.model_config)
        if not (whole and self._drop()):
            super().to("cpu", True, optimizer, grad)  # type: ignore[misc]  # of the engine that this extends
        elif optimizer:
            super().to("cpu", False, True, False)  # type: ignore[misc]  # of the engine that this extends
        get_torch_device().empty_cache()
        self._written, self._host = False, None

    def _arrive(self) -> None:
        """Keep the host's copies, if they are to be kept; called before the parameters return."""
        raise NotImplementedError

    def _drop(self) -> bool:
        """Release the memory of parameters and gradients without a copy. Returns False if the host has no copy."""
        raise NotImplementedError

    def _release_gradients(self) -> None:
        """Release the memory of the gradients; their next use begins with zeros."""
        raise NotImplementedError


def _has_adapters(model_config: Any) -> bool:
    """Return whether verl writes parameters outside of updates: it merges adapters into them and unmerges them."""
    return max(model_config.lora_rank, model_config.lora.get("rank", 0)) > 0
