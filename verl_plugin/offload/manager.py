"""The methods of verl's training engines by which their state leaves a die and returns."""

from __future__ import annotations

from typing import Any

from verl.utils.device import get_torch_device

from post_training.process_context import process_context


class StayingEngines(list["OffloadManager"]):
    """Engines of this process whose parameters stayed on the die after a pass. Actor and reference are two."""


class OffloadManager:
    """Put before a training engine of verl by `extend_engine`.

    Gradients and the optimizer leave after each update, as verl has it: the worker of the rollout, another process,
    takes its memory back before this one is asked for anything. Parameters stay until another engine begins a pass, or
    until verl says so, which it does when the rollout has its weights and before the KV cache returns. Parameters that
    no update wrote since they came give their memory back without a copy.
    """

    mode: str | None
    model_config: Any
    module: Any
    _written = True
    _host: Any = None
    """Host copies of parameters that are on the die, which verl would drop; None once an update may write them."""

    def train_mode(self, **named: Any) -> Any:
        """As upstream, without the other engines' parameters."""
        self._begin()
        self._written, self._host = True, None
        return super().train_mode(**named)  # type: ignore[misc]  # of the engine that this extends

    def eval_mode(self, **named: Any) -> Any:
        """As upstream, without the other engines' parameters."""
        self._begin()
        return super().eval_mode(**named)  # type: ignore[misc]  # of the engine that this extends

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
        """As upstream, but that parameters stay behind a pass, and are copied to the host only if written.

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
        elif model and self.mode is not None:  # verl's context resets it after this call
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
        """Parameters of other engines leave."""
        for engine in [each for each in process_context().of(StayingEngines) if each is not self]:
            engine.to("cpu", model=True, optimizer=False, grad=False)

    def _leave(self, optimizer: bool, grad: bool) -> None:
        """Parameters leave, with a copy if the host's is not theirs."""
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
        """Called before parameters return: what the host holds may be kept."""
        raise NotImplementedError

    def _drop(self) -> bool:
        """Give the memory of parameters and gradients back without a copy; returns whether there is one on the host."""
        raise NotImplementedError

    def _release_gradients(self) -> None:
        """Give the memory of the gradients back, whose next use begins with zeros."""
        raise NotImplementedError


def _has_adapters(model_config: Any) -> bool:
    """Whether verl writes parameters outside of updates: it merges adapters into them, and takes them out again."""
    return max(model_config.lora_rank, model_config.lora.get("rank", 0)) > 0
