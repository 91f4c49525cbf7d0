"""The rehearsal of the stack of 2026: verl 0.9 with vLLM-Ascend 0.23 on torch_npu 2.10, all of them unmodified."""
