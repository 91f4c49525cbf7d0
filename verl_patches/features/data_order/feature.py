"""The feature data_order: its purpose."""

from __future__ import annotations

from overlay import Feature

DATA_ORDER = Feature(
    name="data_order",
    purpose="After a resume the prompts come in the order of the unbroken run, in every epoch.",
)
