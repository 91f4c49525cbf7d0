"""Tests of verl 0.9.1 on the emulator."""
