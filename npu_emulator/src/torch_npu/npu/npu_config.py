"""Options of the compiler and of matrix units, which are kept and given back and change nothing; and of formats."""

from npu_emulator.operators.formats import Permission

_options = {"jit_compile": False, "mm_bmm_format_nd": True}


class _Switch:
    def __init__(self):
        self.allow_hf32 = False


class _NpuConfig:
    @property
    def allow_internal_format(self) -> bool:
        """Whether npu_format_cast gives private formats."""
        return Permission.private_formats

    @allow_internal_format.setter
    def allow_internal_format(self, allowed: bool) -> None:
        Permission.private_formats = bool(allowed)


config = _NpuConfig()
matmul = _Switch()
conv = _Switch()


def set_option(option: dict) -> None:
    if not isinstance(option, dict):
        raise TypeError("npu option must be a dict.")
    _options.update(option)


def set_compile_mode(jit_compile: bool = False) -> None:
    _options["jit_compile"] = jit_compile


def is_jit_compile_false() -> bool:
    return not _options["jit_compile"]


def set_mm_bmm_format_nd(is_nd: bool = True) -> None:
    _options["mm_bmm_format_nd"] = is_nd


def get_mm_bmm_format_nd() -> bool:
    return _options["mm_bmm_format_nd"]
