"""Masks secrets in everything that a run writes or prints: configurations, logs, checkpoints, bundles and reports.

Needs only the standard library: the launchers mask their dry runs with the machine's Python.
"""

from __future__ import annotations

from post_training.masking.streams import masked_output
from post_training.masking.values import MASK, Secrets, masked, masked_text

__all__ = ["MASK", "Secrets", "masked", "masked_output", "masked_text"]
