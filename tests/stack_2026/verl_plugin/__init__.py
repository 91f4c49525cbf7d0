"""Tests of `verl_plugin`, this project's extension of verl 0.9.1, on the emulator."""
