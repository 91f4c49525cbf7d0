"""Types of values, their remedies, and the base class of all groups of keys."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrNone = Count | None
Whole = Annotated[int, Field(ge=0, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST)]
Frequency = Annotated[int, Field(ge=-1, le=LARGEST, description="set it to a number of steps, or -1 for never")]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
Listed = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Files = Annotated[list[Name], Listed, Field(min_length=1)]
# verl's own file says None where it means null, which YAML reads as a word.
NoneAsWord = BeforeValidator(lambda value: None if value == "None" else value)

RateSchedule = Literal["constant", "linear", "cosine"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Backend = Literal["console", "tensorboard", "wandb", "tracking", "mlflow", "swanlab", "vemlp_wandb", "clearml"]

MEGATRON = "this configuration trains with Megatron; for FSDP use one that has actor_rollout_ref.actor.fsdp_config"
PAGE = "docs/not-supported.md"
SEE = f"see {PAGE} for alternatives"
SHARED = f"training and rollout share their dies; {SEE}"


class KeyGroup(BaseModel):
    """A group of keys that rejects unknown keys and converts nothing: "3" is not a number, and neither is NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
