"""A step of the training loop: the data that its stages share, and the interface of the source of its batch."""

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

# Columns that are taken out of a batch to generate from; those of the second line only if they exist.
_GENERATED_FROM = ("input_ids", "attention_mask", "position_ids")
_ALSO_GENERATED_FROM = ("raw_prompt_ids", "multi_modal_data", "raw_prompt", "tools_kwargs")


@dataclass
class Step:
    """A step of the training loop.

    Attributes:
        number: from 1.
        is_last: whether it is the last step of the run.
        metrics: of its stages.
        seconds: of its stages, by the names of verl's timers.
        scored: further values that the reward function returned for each answer, by name.
    """

    number: int
    is_last: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    scored: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of this context to those of `name`."""
        begun = perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - begun


@dataclass(frozen=True)
class Workers:
    """The calls that make answers and rewards.

    Attributes:
        generate: takes a `DataProto` of prompts, whose number is a multiple of `multiple`.
        multiple: see above.
        reward: takes a `DataProto` of answers.
    """

    generate: Callable[[Any], Any]
    multiple: int
    reward: Callable[[Any], Rewards]


@dataclass(frozen=True)
class Collected:
    """The prompts and answers that a step trains on.

    Attributes:
        epoch: the epoch of its prompts, from 0.
        prompts: one row per prompt, without the columns in `asked`.
        asked: the columns to generate from.
        answers: as the workers return them, those to one prompt in a row.
        rewards: None if nothing is scored yet.
    """

    epoch: int
    prompts: DataProto
    asked: DataProto
    answers: DataProto
    rewards: Rewards | None = None


class Trainer(Protocol):
    """The parts of the training loop that features use: its state, its groups of workers, and its calls in a step."""

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
        """Return the tokens that end an answer."""


class Source(Protocol):
    """Collects the batch of every step."""

    @property
    def ended_by(self) -> str | None:
        """The reason why batches ran out before the last step, if the run shall save and stop then."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last batch."""

    def collect(self, step: Step, workers: Workers) -> Collected | None:
        """Collect the batch of a step; None if there are no prompts left."""


def split(rows: Any) -> tuple[DataProto, DataProto]:
    """Split collated rows of the dataset into a `DataProto` of prompts and one of the columns to generate from."""
    from verl import DataProto

    prompts = DataProto.from_single_dict(rows)
    further = [name for name in _ALSO_GENERATED_FROM if name in prompts.non_tensor_batch]
    return prompts, prompts.pop(batch_keys=list(_GENERATED_FROM), non_tensor_batch_keys=further)
