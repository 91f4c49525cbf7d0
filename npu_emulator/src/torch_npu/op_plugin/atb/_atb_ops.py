def _register_atb_extensions() -> None:
    """The atb operators are registered by the emulator when it is imported."""
