class _FlopsCounter:
    """Floating point operations are not counted."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def get_flops(self) -> list[int]:
        return [0, 0]
