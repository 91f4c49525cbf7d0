"""Imported by every Python that torch_npu's own tests start.

Tensors that ranks of distributed tests pass to each other are in files: a rank may end before its result has been
taken, and would take shared memory with it. torch's own test module also imports expecttest, for checks that no
operator test uses.
"""

import importlib.util
import sys
import types
import unittest
from pathlib import Path

if importlib.util.find_spec("expecttest") is None:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
if Path.cwd().name == "distributed" and importlib.util.find_spec("torch"):
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
