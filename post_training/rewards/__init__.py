"""Rewards computed by a rule: is the answer of a response right or wrong?"""

from post_training.rewards.rules import RULES, accuracy, has_form, score

__all__ = ["RULES", "accuracy", "has_form", "score"]
