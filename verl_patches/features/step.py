"""A step of the training loop as its stages share it, and what a step is made of: the batch that a source collects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from verl import DataProto

    from post_training.end_tokens import EndTokens

Rewards = tuple["torch.Tensor", Mapping[str, Sequence[Any]]]
"""[answers, response length], and further values of each answer by name."""

# What is taken out of a batch to generate from; of the second line, what there is.
_GENERATED_FROM = ("input_ids", "attention_mask", "position_ids")
_ALSO_GENERATED_FROM = ("raw_prompt_ids", "multi_modal_data", "raw_prompt", "tools_kwargs")


@dataclass
class Step:
    """number: from 1. metrics and seconds: what its stages report, seconds by the names of verl's timers. scored: what
    rewards say of each answer beside its score, by name."""

    number: int
    is_last: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    scored: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to those of `name`."""
        begun = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begun


@dataclass(frozen=True)
class Workers:
    """What makes answers and rewards.

    generate: for a `DataProto` of prompts, whose number is a multiple of `multiple`. reward: for one of answers.
    """

    generate: Callable[[Any], Any]
    multiple: int
    reward: Callable[[Any], Rewards]


@dataclass(frozen=True)
class Collected:
    """What a step trains on.

    epoch: that its prompts are due in, from 0. prompts: a row each, without what was generated from, which is `asked`.
    answers: as the workers give them, those to one prompt in a row. rewards: None where nothing is scored yet.
    """

    epoch: int
    prompts: DataProto
    asked: DataProto
    answers: DataProto
    rewards: Rewards | None = None


class Trainer(Protocol):
    """What features read of the training loop: groups of workers, and what is called for a step."""

    config: Any
    global_steps: int
    total_training_steps: int
    train_dataset: Any
    train_dataloader: Any
    actor_rollout_wg: Any
    ref_policy_wg: Any
    critic_wg: Any
    use_reference_policy: bool
    use_critic: bool
    reward_fn: Any
    val_reward_fn: Any
    source: Source

    def log(self, metrics: dict[str, Any]) -> None:
        """Report the step."""

    def end_tokens(self) -> EndTokens:
        """The tokens that end an answer."""


class Source(Protocol):
    """Collects the batch of every step."""

    @property
    def ended_by(self) -> str | None:
        """Why there is no batch before the last step's, if the run is to save and stop then."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Of the last batch, as metrics."""

    def collect(self, step: Step, workers: Workers) -> Collected | None:
        """The batch of a step; None where there are no prompts left."""


def split(rows: Any) -> tuple[DataProto, DataProto]:
    """Collated rows of the dataset as a `DataProto`, and what of them is sent to generate from, which is taken out."""
    from verl import DataProto

    prompts = DataProto.from_single_dict(rows)
    further = [name for name in _ALSO_GENERATED_FROM if name in prompts.non_tensor_batch]
    return prompts, prompts.pop(batch_keys=list(_GENERATED_FROM), non_tensor_batch_keys=further)
