"""Rewards computed by a rule: is the answer of a response right or wrong?"""

from verl_patches.features.reward.rules import RULES, score

__all__ = ["RULES", "score"]
