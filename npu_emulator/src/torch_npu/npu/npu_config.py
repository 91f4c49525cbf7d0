"""Options of the compiler and of matrix units. They are kept and given back, and change nothing."""

_options = {"jit_compile": False, "mm_bmm_format_nd": True}


class _Switch:
    def __init__(self):
        self.allow_hf32 = False


class _NpuConfig:
    allow_internal_format = False


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
