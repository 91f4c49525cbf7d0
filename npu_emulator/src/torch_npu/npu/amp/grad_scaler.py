import torch


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for the NPU."""

    def __init__(
        self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True, **_
    ):
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
