"""Read by every Python that a project's tests start: tensors that processes hand each other live in files.

A rank may end before its result has been taken, and takes what it only lent with it.
"""

import importlib.util

if importlib.util.find_spec("torch"):
    import torch.multiprocessing

    torch.multiprocessing.set_sharing_strategy("file_system")
