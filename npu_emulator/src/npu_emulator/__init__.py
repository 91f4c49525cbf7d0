"""An Ascend NPU in software, beneath the published torch_npu: CANN, HCCL and ATB emulated on host memory."""
