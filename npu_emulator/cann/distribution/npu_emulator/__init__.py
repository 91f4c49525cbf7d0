"""An Ascend NPU in software, beneath the published torch_npu: the commands of the distribution npu-emulator-cann."""
