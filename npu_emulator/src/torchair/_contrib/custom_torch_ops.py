"""Nothing to register: torch_npu has all operators."""
