"""The feature precision: one key, for training and rollout together."""

from typing import Literal

from overlay import Feature, Key

Precision = Literal["bfloat16", "float32"]

PRECISION = Feature(
    name="precision",
    purpose="Training and rollout run in float32 where their log-probs are to be compared closely.",
    keys=(Key("precision", "actor_rollout_ref.overlay.precision", Precision, "bfloat16"),),
    switch="actor_rollout_ref.overlay.precision",
    is_on=lambda settings: settings.precision != "bfloat16",
)
