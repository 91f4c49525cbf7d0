"""Rewards computed by rules, which decide whether the answer of a response is right or wrong."""

from post_training.rewards.rules import RULES, accuracy, has_form, score

__all__ = ["RULES", "accuracy", "has_form", "score"]
