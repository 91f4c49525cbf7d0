class _Section:
    """Options of a part of the compiler; any can be set, none has an effect."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        section = _Section()
        object.__setattr__(self, name, section)
        return section


class CompilerConfig(_Section):
    """Options of the graph compiler."""
