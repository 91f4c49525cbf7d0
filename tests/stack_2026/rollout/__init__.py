"""Tests of `verl_plugin.rollout`."""
