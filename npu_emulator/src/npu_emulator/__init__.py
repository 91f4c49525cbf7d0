"""An Ascend NPU in software, below the published torch_npu: CANN, HCCL and ATB emulated on host memory."""
