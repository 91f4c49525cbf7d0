"""The feature answer_ends. It has no switch: without it, padding would be trained on, or an answer's end would not."""

from overlay import Feature

ANSWER_ENDS = Feature(
    name="answer_ends",
    purpose="An answer's mask ends at the token at which the engine stopped, whichever file defines its end tokens.",
)
