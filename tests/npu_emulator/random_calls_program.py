"""Calls emulated operators with arguments drawn at random that their documents allow, and waits for each.

Started by `test_random_calls`: `python -m tests.npu_emulator.random_calls_program FILE SEED CALLS` draws until CALLS
have been accepted, and writes to FILE how many were accepted and rejected. Until then FILE holds the number of the
current call, and its operator: a fourth argument, the number to begin with, repeats that call.

Each tensor lies between two pages that nobody may touch, at the end of its memory or at its beginning, so that whatever
reads or writes beyond it, ATen's kernels too, ends the process at once.
"""

import ctypes
import itertools
import json
import math
import mmap
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.npu_emulator.documented import DTYPES, RULES, Parameter, read_rules
from tests.npu_emulator.documented_program import LIBRARY, NUMBERS, written_operators

WHOLE_NUMBERS = {"INT8": "i1", "UINT8": "u1", "BOOL": "?", "INT16": "i2", "INT32": "i4", "INT64": "i8"}
FRACTIONS = {
    "FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "DOUBLE": torch.float64,
    "COMPLEX64": torch.complex64, "COMPLEX128": torch.complex128,
}  # fmt: skip
# Sizes of few elements, so that shapes of several tensors fit together often; 0 is an empty tensor.
SIZES, SIZE_WEIGHTS = (0, 1, 2, 3, 4, 8, 16, 32), (1, 4, 8, 4, 8, 4, 4, 2)
# Words that attributes of operators accept.
WORDS = ("", "none", "mean", "sum", "constant", "reflect", "gelu", "erf", "tanh", "swish", "BSH", "SBH", "BNSD", "BSND",
         "TND", "BSND_NBSD", "half", "interleave", "linear", "nearest", "floor", "trunc")  # fmt: skip
WHOLE = (-2, -1, 0, 1, 2, 3, 4, 8)
REAL = (0.0, 1.0, -1.0, 0.5, 1e-5, 2.0, 3.0, math.inf)
_RANKS = frozenset(range(5))


def c_function(name: str, result: Any = ctypes.c_int) -> Callable[..., Any]:
    function = getattr(LIBRARY, name)
    function.restype = result
    return function


def small_ranks(parameter: Parameter) -> list[int]:
    """Numbers of dimensions that a parameter may have: up to 5, or the smallest."""
    allowed = parameter.ranks or _RANKS
    return sorted(rank for rank in allowed if rank <= 5) or [min(allowed)]


class GuardedMemory:
    """Blocks of 64 KiB with a page on both sides that nobody may touch. One block is one tensor's for one call."""

    BLOCKS, BLOCK = 64, 1 << 16
    STEP = BLOCK + mmap.PAGESIZE

    def __init__(self) -> None:
        size = self.BLOCKS * self.STEP + mmap.PAGESIZE
        self._kept = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._kept))
        for block in range(self.BLOCKS + 1):
            guard = ctypes.c_void_p(self._address + block * self.STEP)
            assert not c_function("mprotect")(guard, ctypes.c_size_t(mmap.PAGESIZE), 0)
        self._used = 0

    def take(self, data: bytes, at_end: bool) -> ctypes.c_void_p:
        """Copy `data` to the end or to the beginning of a block and return its address."""
        assert len(data) <= self.BLOCK and self._used < self.BLOCKS
        start = self._address + self._used * self.STEP + mmap.PAGESIZE
        place = start + (self.BLOCK - len(data) if at_end else 0)
        ctypes.memmove(place, data, len(data))
        self._used += 1
        return ctypes.c_void_p(place)

    def free(self) -> None:
        self._used = 0


@dataclass
class Call:
    """The draws of one call, with the objects that must live until it is done."""

    draw: random.Random
    memory: GuardedMemory
    dtype: str
    shape: tuple[int, ...]
    in_lists: int
    destroy: list[tuple[str, ctypes.c_void_p]] = field(default_factory=list)

    def made(self, create: str, destroy: str, *arguments: object) -> ctypes.c_void_p:
        """Create an object of CANN that is destroyed with the call."""
        made = ctypes.c_void_p(c_function(create, ctypes.c_void_p)(*arguments))
        self.destroy.append((destroy, made))
        return made

    def elements(self, dtype: str, count: int) -> bytes:
        """Zeros and ones for whole numbers, indices of most dimensions; fractions for the others, few not finite."""
        generator = numpy.random.default_rng(self.draw.getrandbits(64))
        if dtype not in FRACTIONS:
            return generator.integers(0, 2, count).astype(WHOLE_NUMBERS[dtype]).tobytes()
        values = torch.from_numpy(generator.uniform(-2, 2, count))
        if self.draw.random() < 0.05:
            values = torch.where(values > 0, math.inf, math.nan)
        return values.to(FRACTIONS[dtype]).view(torch.uint8).numpy().tobytes() if count else b""

    def rank(self, parameter: Parameter) -> int:
        given = len(self.shape)
        return given if given in (parameter.ranks or _RANKS) else self.draw.choice(small_ranks(parameter))

    def sizes(self, parameter: Parameter) -> tuple[int, ...]:
        """Draw the call's shape for most tensors; the rest broadcast with it, reverse it, or have other sizes.

        At most 1024 elements.
        """
        sizes = self.any_sizes(parameter)
        while math.prod(sizes) > 1024:
            sizes = tuple(min(size, 2) if at % 2 else (size + 1) // 2 for at, size in enumerate(sizes))
        return sizes

    def any_sizes(self, parameter: Parameter) -> tuple[int, ...]:
        rank, form = self.rank(parameter), self.draw.random()
        fitting = (*self.shape, *self.draw.choices(SIZES, SIZE_WEIGHTS, k=rank))[:rank]
        if form < 0.75:
            return fitting
        if form < 0.83:
            return tuple(self.draw.choice((1, size)) for size in fitting)
        if form < 0.9:
            return fitting[::-1]
        return tuple(self.draw.choices(SIZES, SIZE_WEIGHTS, k=rank))

    def tensor(self, parameter: Parameter) -> ctypes.c_void_p:
        if not parameter.required and self.draw.random() < 0.3:
            return ctypes.c_void_p()
        allowed = parameter.dtypes or DTYPES.keys()
        dtype = self.dtype if self.dtype in allowed and self.draw.random() < 0.9 else self.draw.choice(sorted(allowed))
        sizes = self.sizes(parameter)
        order = list(range(len(sizes)))
        if not parameter.contiguous and self.draw.random() < 0.2:
            self.draw.shuffle(order)
        strides, step = [0] * len(sizes), 1
        for at in reversed(order):
            strides[at], step = step, step * sizes[at]
        offset = 0 if parameter.contiguous else self.draw.choice((0, 0, 0, 3))
        array = ctypes.c_int64 * len(sizes)
        data = self.memory.take(self.elements(dtype, math.prod(sizes) + offset), self.draw.random() < 0.7)
        count = ctypes.c_uint64(len(sizes))
        return self.made(
            "aclCreateTensor", "aclDestroyTensor", array(*sizes), count, DTYPES[dtype], array(*strides),
            ctypes.c_int64(offset), 2, (ctypes.c_int64 * 1)(math.prod(sizes) + offset), ctypes.c_uint64(1), data,
        )  # fmt: skip

    def scalar(self, parameter: Parameter) -> ctypes.c_void_p:
        if not parameter.required and self.draw.random() < 0.2:
            return ctypes.c_void_p()
        dtype = self.draw.choice(("FLOAT", "DOUBLE", "INT64", "BOOL"))
        value = (ctypes.c_char * 8).from_buffer_copy(self.elements(dtype, 1).ljust(8, b"\0"))
        return self.made("aclCreateScalar", "aclDestroyScalar", value, DTYPES[dtype])

    def array(self, create: str, destroy: str, kind: Any, values: tuple) -> ctypes.c_void_p:
        if self.draw.random() < 0.15:
            return ctypes.c_void_p()
        chosen = self.draw.choices(values, k=self.draw.choice((0, 1, 2, len(self.shape), len(self.shape))))
        return self.made(create, destroy, (kind * len(chosen))(*chosen), ctypes.c_uint64(len(chosen)))

    def objects(self, create: str, destroy: str, make: Callable[[Parameter], ctypes.c_void_p], parameter: Parameter):
        """A list of tensors or scalars, which are destroyed with it."""
        first = len(self.destroy)
        count = self.in_lists if self.draw.random() < 0.95 else self.draw.choice((0, 1, 2, 3))
        objects = [made for made in (make(parameter) for _ in range(count)) if made]
        del self.destroy[first:]
        return self.made(create, destroy, (ctypes.c_void_p * len(objects))(*objects), ctypes.c_uint64(len(objects)))

    def argument(self, parameter: Parameter) -> object:
        """Return the C value of an argument for a parameter."""
        match parameter.kind:
            case "Tensor":
                return self.tensor(parameter)
            case "TensorList":
                return self.objects("aclCreateTensorList", "aclDestroyTensorList", self.tensor, parameter)
            case "Scalar":
                return self.scalar(parameter)
            case "ScalarList":
                return self.objects("aclCreateScalarList", "aclDestroyScalarList", self.scalar, parameter)
            case "IntArray":
                numbers = (*WHOLE, *self.shape, *self.shape)
                return self.array("aclCreateIntArray", "aclDestroyIntArray", ctypes.c_int64, numbers)
            case "FloatArray":
                return self.array("aclCreateFloatArray", "aclDestroyFloatArray", ctypes.c_float, REAL)
            case "BoolArray":
                return self.array("aclCreateBoolArray", "aclDestroyBoolArray", ctypes.c_bool, (False, True))
            case "char*":
                words = parameter.values.split(",") if parameter.values else WORDS
                return ctypes.c_char_p(self.draw.choice(words).encode())
            case "bool":
                number = self.draw.random() < 0.5 if not parameter.values else parameter.values == "1"
            case "float" | "double":
                number = self.draw.choice(REAL)
            case "DataType":
                number = DTYPES[self.draw.choice((self.dtype, "FLOAT", "INT64"))]
            case "uint64":
                number = self.draw.choice((0, 1, 2, 7))
            case "int8" | "int32" | "int64":
                number = self.draw.choice(parameter.allowed((*WHOLE, *self.shape)))
            case _:
                raise ValueError(f"{parameter.name} is of kind {parameter.kind}, which nothing is drawn for")
        return NUMBERS[parameter.kind](number)

    def end(self) -> None:
        for destroy, made in self.destroy:
            c_function(destroy)(made)
        self.memory.free()


def draw_call(draw: random.Random, memory: GuardedMemory, parameters: list[Parameter]) -> Call:
    """Draw a type and a shape that the first tensor may have; the others follow it if they may."""
    anything = Parameter("", "", frozenset(), frozenset(), False, False)
    first = next((each for each in parameters if each.kind.startswith("Tensor")), anything)
    shape = tuple(draw.choices(SIZES, SIZE_WEIGHTS, k=draw.choice(small_ranks(first))))
    return Call(draw, memory, draw.choice(sorted(first.dtypes or DTYPES)), shape, draw.choice((1, 2, 3)))


def run(operator: str, parameters: list[Parameter], call: Call, stream: ctypes.c_void_p) -> str:
    """ "taken", or which of the three steps refused: the arguments, the operator, or the wait for it."""
    try:
        arguments = [call.argument(each) for each in parameters]
        size, executor = ctypes.c_uint64(), ctypes.c_void_p()
        if c_function(f"{operator}GetWorkspaceSize")(*arguments, ctypes.byref(size), ctypes.byref(executor)):
            return "arguments refused"
        if c_function(operator)(ctypes.c_void_p(), size, executor, stream):
            return "operator refused"
        return "wait refused" if c_function("aclrtSynchronizeStream")(stream) else "taken"
    finally:
        call.end()


def written_and_documented() -> dict[str, list[Parameter]]:
    """Return the parameters of the emulated operators whose document has the same ones."""
    written, rules = written_operators(), read_rules(RULES.read_text())
    return {
        operator: rules[operator]
        for operator in sorted(written.keys() & rules.keys())
        if written[operator] == [each.kind for each in rules[operator]]
    }


def main() -> None:
    results, (seed, calls, first) = Path(sys.argv[1]), (int(text) for text in (*sys.argv[2:], "0")[:3])
    operators, memory = written_and_documented(), GuardedMemory()
    stream = ctypes.c_void_p()
    assert not c_function("aclInit")(None)
    assert not c_function("aclrtSetDevice")(0)
    assert not c_function("aclrtCreateStream")(ctypes.byref(stream))
    outcomes: dict[str, Counter[str]] = {operator: Counter() for operator in operators}
    taken, number = 0, itertools.count(first)
    with results.open("w") as current:
        while taken < calls:
            at = next(number)
            draw = random.Random(f"{seed}:{at}")
            operator = draw.choice([*operators])
            current.seek(0)
            current.write(f"{at} {operator:80}")
            current.flush()
            parameters = operators[operator]
            outcome = run(operator, parameters, draw_call(draw, memory, parameters), stream)
            outcomes[operator][outcome] += 1
            taken += outcome == "taken"
    results.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
