"""Tests of the 2026 stack."""

from importlib.metadata import version

from overlay.pins import Pins

IS_INSTALLED = version("torch_npu") == Pins.read(stack="2026").of_module("torch_npu").release
