class _FlopsCounter:
    """Floating point operations are not counted: asking for their number is an error, not a zero."""

    def start(self) -> None:
        raise NotImplementedError("torch_npu.utils.FlopsCounter is not emulated")
