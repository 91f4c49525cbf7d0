"""The feature critic: its purpose. What a critic is rejected with is in `trainer/configuration_checks/critic`."""

from overlay import Feature

CRITIC = Feature("critic", "The values of PPO's critic, and its loss, are those of the tokens of answers alone.")
