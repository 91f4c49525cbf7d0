"""Leave out the tests of the stack 2026 if another one is installed; `bash scripts/test.sh --stack 2026` runs them."""

from importlib.metadata import version

from overlay.pins import Pins

TORCH_NPU = Pins.read(stack="2026").of_module("torch_npu")

collect_ignore_glob = [] if version("torch_npu") == TORCH_NPU.release else ["*"]
