"""A pass over a batch whose samples carry the rollout's experts; both training engines share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from verl_plugin.routing_replay.given import GivenExperts, Rows, Tally, bytes_metric, metrics_of
from verl_plugin.routing_replay.samples import checked, known_rows

FIELD = "routed_experts"


class RoutedPasses:
    """Mixin that `extend_engine` puts before a training engine of verl.

    With `router_replay.mode=R3` every pass uses the rollout's experts. With `disabled` the actor compares them with its
    own. Mode R2 and batches without experts are verl's.
    """

    engine_config: Any
    model_config: Any
    _in_pass: bool = False
    _forward_only: bool = False

    def initialize(self) -> None:
        """As upstream; then find the routers."""
        super().initialize()  # type: ignore[misc]  # of the engine that this extends
        self._tally = Tally()
        self._read_bytes = 0
        if self._mode != "R2":
            self._attach(self._mode == "R3", None if self.engine_config.forward_only else self._tally)

    def forward_backward_batch(self, data: Any, loss_function: Callable | None, forward_only: bool = False) -> Any:
        """Run upstream's pass with the rollout's experts.

        Raises:
            ValueError: the batch has no experts, or they do not belong to these samples and this model.
        """
        experts = data.get(FIELD, None)
        if experts is None and self._mode == "R3":
            raise ValueError(
                "router_replay.mode=R3 is invalid: the samples came without experts. Set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay to true."
            )
        compares = self._mode == "disabled" and not self.engine_config.forward_only
        if experts is None or not (compares or self._mode == "R3"):
            return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]  # of the engine
        known = known_rows(data["input_ids"], data["response_mask"])
        checked(experts, data["input_ids"], known, self.model_config.hf_config)
        # Switches off verl's own replay, which this one replaces.
        tu.assign_non_tensor_data(data, "enable_routing_replay", False)
        try:
            self._in_pass, self._forward_only = True, forward_only
            output = super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]  # of the engine
        finally:
            self._in_pass = False
            for each in self._routers():
                each.release()
        if not forward_only:
            self._report(output, experts, is_last=tu.get(data, key="update_lr_scheduler", default=False))
        return output

    def get_per_tensor_param(self, **named: Any) -> Any:
        """As upstream. The rollout gets these weights, so experts can be compared again."""
        self._tally.open = True
        return super().get_per_tensor_param(**named)  # type: ignore[misc]  # of the engine that this extends

    @property
    def _mode(self) -> str:
        replay = self.engine_config.router_replay
        # verl's files have no such section for FSDP2, and one that a user adds stays a dictionary.
        return replay.get("mode", "disabled") if isinstance(replay, Mapping) else replay.mode

    @contextmanager
    def _forward_of(self, routers: Iterable[GivenExperts], rows: Rows) -> Iterator[None]:
        """Give `rows` to the routers while the block runs the forward of a micro batch."""
        routers = list(routers)
        for each in routers:
            each.begin(rows, has_backward=not self._forward_only)
        try:
            yield
        finally:
            for each in routers:
                each.end()

    def _report(self, output: Any, experts: torch.Tensor, is_last: bool) -> None:
        """Add the metrics of an update to its output. Collective over all ranks."""
        self._read_bytes += experts.values().nbytes
        numbers = self._tally.take(get_device_id())
        sums = torch.cat([numbers, numbers.new_tensor([self._read_bytes])])
        torch.distributed.all_reduce(sums)
        *counts, read = sums.tolist()
        found = metrics_of(counts) if self._tally.open else {}
        self._tally.open = False
        if is_last:
            # Ranks that compute parts of the same samples read the same experts.
            copies = torch.distributed.get_world_size() // self.get_data_parallel_size()  # type: ignore[attr-defined]  # of the engine
            found |= bytes_metric(read / copies)
            self._read_bytes = 0
        if "metrics" in output:
            output["metrics"] |= {name: [value] for name, value in found.items()}

    def _routers(self) -> Iterable[GivenExperts]:
        """Return the given experts of all routers of this rank."""
        raise NotImplementedError

    def _attach(self, replays: bool, tally: Tally | None) -> None:
        """Put a `GivenExperts` on every router of this rank."""
        raise NotImplementedError
