"""Tests of `verl_plugin.onpolicy`."""
