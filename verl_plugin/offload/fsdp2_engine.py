"""Offloads and reloads the parameters of verl's FSDP2 engine."""

from __future__ import annotations

import torch

from verl_plugin.offload.manager import OffloadManager


class OffloadedFSDP2(OffloadManager):
    """Keeps the parameters' host tensors, as verl makes new ones for each move. A reference is always on the host."""

    _host: dict[int, torch.Tensor] | None

    def _arrive(self) -> None:
        parameters = list(self.module.parameters())
        if not all(parameter.device.type == "cpu" for parameter in parameters):
            return  # they are on the die already
        # Detached: verl replaces the contents of the parameters by those on the die.
        self._host = {id(parameter): parameter.detach() for parameter in parameters}

    @torch.no_grad()
    def _drop(self) -> bool:
        host = self._host
        if host is None:
            return False

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            kept = host.pop(id(tensor), None)
            return tensor.to("cpu") if kept is None else kept

        self.module._apply(moved)
        return True

    def _release_gradients(self) -> None:
        """Do nothing: verl's optimizer has released them already."""
