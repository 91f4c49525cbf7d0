"""An Ascend NPU in software.

The device ``npu`` is a torch backend whose memory is host memory and whose kernels are torch's CPU kernels.
``torch_npu``, ``acl`` and ``torchair``, which this distribution provides too, give it the interface of the real one.
"""

import os

from .presence import refuse_real_npu

refuse_real_npu()

# While torch is being imported it would import torch_npu, and with it this module, a second time.
_autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch  # noqa: E402,F401

if _autoload is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload

from . import _C  # noqa: E402
from .process_end import at_process_end  # noqa: E402

at_process_end(_C.leave_node)
