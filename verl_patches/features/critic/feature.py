"""The feature critic: its purpose. Its configuration is checked in `trainer/configuration_checks/critic`."""

from overlay import Feature

CRITIC = Feature("critic", "The values and the loss of PPO's critic cover only the tokens of answers.")
