"""Fork Ray workers from one process that has already imported the stack.

Four workers that each import torch, vLLM, transformers and verl spend most of a small run's start-up on it. Here
the driver starts one *template* process that imports them once; Ray's documented ``py_executable`` runtime
environment points at a small client, which asks the template to fork and become the worker. The workers are ordinary
Ray workers in every other respect. It is meant for small machines without an NPU: a process that has touched a real
device must not be forked.
"""

from rehearsal.prefork.launch import PreforkError, Template, set_up_workers_quickly, start_template

__all__ = ["PreforkError", "Template", "set_up_workers_quickly", "start_template"]
