"""The feature critic: its purpose. Its configuration is checked in `trainer/configuration_checks/critic`."""

from overlay import Feature

CRITIC = Feature("critic", "The values of PPO's critic, and its loss, are those of the tokens of answers alone.")
