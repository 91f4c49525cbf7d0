"""The shards of Megatron's distributed optimizer on this rank, by the names of the model's own tensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.training_files import MOMENTS


@dataclass(frozen=True)
class OptimizerShard:
    """The elements `start` to `stop` of a local weight, which this rank updates.

    Attributes:
        local, shape: of the weight.
        main: the elements in float32, a vector.
        state: the inner optimizer's state for them, empty before the first update.
        group: the inner optimizer's parameter group.
        step_in_group: the inner optimizer counts updates in the group, as apex's and MindSpeed's fused Adam do, and not
            in the state of every parameter, as torch's and MindSpeed's swapping one do.
        away: host tensors in which MindSpeed's swapping optimizer keeps the elements and their averages, while `main`
            and the tensors of `state` have no memory between its steps; None with any other optimizer.
    """

    local: str
    shape: tuple[int, ...]
    start: int
    stop: int
    main: torch.Tensor
    state: MutableMapping[str, Any]
    group: MutableMapping[str, Any]
    step_in_group: bool
    away: Mapping[str, torch.Tensor] | None = None

    @property
    def master(self) -> torch.Tensor:
        """The float32 elements, in device or host memory, as a vector."""
        return self.main if self.away is None else self.away["param"]

    @property
    def steps(self) -> int:
        """Number of updates of these elements."""
        if MOMENTS[0] not in self.state:
            return 0
        return int(self.group["step"] if self.step_in_group else self.state.get("step", 0))

    def moments(self) -> dict[str, torch.Tensor]:
        """Return AdamW's averages by name; empty before the first update.

        Raises:
            CheckpointError: an average has no memory, because the optimizer has swapped it out.
        """
        if self.away is not None:
            return {name: self.away[name] for name in MOMENTS} if self.steps else {}
        found = {name: self.state[name] for name in MOMENTS if name in self.state}
        for name, tensor in found.items():
            if tensor.untyped_storage().nbytes() < tensor.nbytes:
                raise CheckpointError(
                    f"{name} of {self.local} is not in memory. Set trainer.save_freq=-1 where an optimizer swaps it"
                )
        return found

    def create_state(self, steps: int) -> None:
        """Set averages of zero and count `steps` updates; with 0 steps, clear the state as in a new optimizer."""
        if self.away is not None:
            for name in MOMENTS:
                self.away[name].zero_()
            self.state.pop("step", None)
            if steps:
                self.state["step"] = torch.tensor(steps, dtype=torch.int64, device=self.main.device)
            return
        self.state.clear()
        if steps:
            self.state.update({name: torch.zeros_like(self.main) for name in MOMENTS})
        if self.step_in_group:
            self.group["step"] = steps
        elif steps:
            self.state["step"] = torch.tensor(float(steps), dtype=torch.float32)


def optimizer_shards(optimizer: Any, tensors: Mapping[str, torch.Tensor]) -> list[OptimizerShard]:
    """Return the shards of Megatron's distributed optimizer, or of several ones in a chain.

    `tensors` are the model's parameter objects by local name.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner, away = part.optimizer, getattr(part, "param_to_cpu_states_map", {})
        step_in_group = not away and not isinstance(inner, torch.optim.Adam | torch.optim.AdamW)
        for weights, mains in (
            (part.model_fp32_groups, part.shard_fp32_groups),
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        ):
            for group, of_group, mains_of_group in zip(inner.param_groups, weights, mains, strict=True):
                for weight, main in zip(of_group, mains_of_group, strict=True):
                    interval = part._get_model_param_range_map(weight)["param"]
                    found.append(
                        OptimizerShard(
                            names[id(weight)],
                            tuple(weight.shape),
                            interval.start,
                            interval.end,
                            main,
                            inner.state[main],
                            group,
                            step_in_group,
                            away.get(main),
                        )
                    )
    return found
