"""torch's own samples of its operators (OpInfo): forward and gradient on the NPU equal those on the CPU.

Exceptions are in torch_operators.toml with their reason: an operator of CANN that is not emulated, a difference of
torch_npu's own, a call that only strict mode rejects, or why it cannot be compared. An operator that fails and is not
listed, or is listed and does not fail so, is an error. ``python -m tests.npu_emulator.test_torch_operators FILE``
writes the results as JSON, and with ``--together SAMPLES`` those of `unrelated`.
"""

import functools
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tomllib
import types
import unittest
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch_npu  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map

pytestmark = pytest.mark.slow

SAMPLES = 2
LEAST_EQUAL, LEAST_EQUAL_IN_STRICT_MODE = 640, 635
LISTED = Path(__file__).with_name("torch_operators.toml")
_NOT_EMULATED = re.compile(r"(?:aclnn|aclop operator )(\w+) is not emulated")
_FORBIDDEN = re.compile(r"EZ1001\): (.+)")
# How two tensors of a call go together, in CANN's words.
_UNRELATED = re.compile(r"aclnn\w+: .*EZ1001\): .*(?:same dtype|same size|must match the size).*")
TYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.int32, torch.uint8,
    torch.bool,
)  # fmt: skip
WITH_GRADIENTS = TYPES[:3]


@functools.cache
def operator_list() -> dict:
    """Return torch's list. Its module imports expecttest, which nothing here needs.

    Each list of samples would search the stack for a `unittest.TestCase`, which took more time than the operators.
    """
    if importlib.util.find_spec("expecttest") is None:
        absent = types.ModuleType("expecttest")
        absent.TestCase = unittest.TestCase
        sys.modules["expecttest"] = absent
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db

    common_utils.extract_test_fn = lambda: None
    return {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}


def absolute(values: torch.Tensor) -> torch.Tensor:
    """Return absolute values; squares for complex numbers, since torch_npu has no gradient of their `abs`."""
    return torch.view_as_real(values.resolve_conj()).square().sum(-1) if values.is_complex() else values.abs()


def run(op, sample, device: str) -> list[torch.Tensor]:
    """Run one sample on a device and return results and gradients on the host."""
    torch.manual_seed(0)

    def move(value):
        return value.detach().to(device).requires_grad_(value.requires_grad) if torch.is_tensor(value) else value

    args, kwargs = tree_map(move, ((sample.input, *sample.args), sample.kwargs))
    if "device" in kwargs:
        kwargs["device"] = device
    results = [value for value in tree_leaves(op(*args, **kwargs)) if torch.is_tensor(value)]
    assert all(value.device.type == device for value in results), "a result on another device"
    leaves = [value for value in tree_leaves((args, kwargs)) if torch.is_tensor(value) and value.requires_grad]
    losses = [absolute(value).sum() for value in results if value.requires_grad]
    gradients = torch.autograd.grad(losses, leaves, allow_unused=True) if losses and leaves else ()
    return [value.detach().cpu() for value in (*results, *gradients) if value is not None]


def difference(op) -> str | None:
    """Return the fault of an operator on the NPU; None if there is none."""
    torch.manual_seed(0)
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype == torch.float32)
    try:
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            torch.testing.assert_close(run(op, sample, "npu"), run(op, sample, "cpu"), equal_nan=True)
    except Exception as error:
        if refused := _NOT_EMULATED.search(str(error)):
            return f"not emulated: {refused[1]}"
        if forbidden := _FORBIDDEN.search(str(error)):
            return forbidden[1]
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def unrelated(op, most_samples: int = 1) -> str | None:
    """Return the first call of an operator that strict mode rejects because two of its tensors do not go together.

    torch's samples, up to `most_samples` in each type, lead to calls that torch_npu makes itself; other rejections do
    not count.
    """
    for dtype in (each for each in TYPES if each in op.dtypes):
        torch.manual_seed(0)
        with_gradient = op.supports_autograd and dtype in WITH_GRADIENTS
        try:
            made = op.sample_inputs("cpu", dtype, requires_grad=with_gradient)
            samples = list(itertools.islice(made, most_samples))
        except Exception:  # which some operators do not make in some types
            continue
        for sample in samples:
            try:
                run(op, sample, "npu")
            except Exception as error:
                if refused := _UNRELATED.search(str(error)):
                    return refused[0]
    return None


def _seed(seed: int) -> torch.Generator:
    """Seed as `torch.manual_seed` does, which also notes the stack for each absent kind of device: half of the time."""
    torch.npu.manual_seed(seed)
    return torch.default_generator.manual_seed(seed)


def _serve(names: list[str], answers: Connection, find: Callable[[object], str | None]) -> None:
    os.environ["TASK_QUEUE_ENABLE"] = "0"  # so that the rejected call itself raises
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed = _seed
    for name in names:
        answers.send((name, find(operator_list()[name])))
    os._exit(0)


def differences(names: list[str], find: Callable[[object], str | None] | None = None) -> dict[str, str | None]:
    """Run `find` on each operator in a forked process and return the results; if one ends it, another continues."""
    found: dict[str, str | None] = {}
    while len(found) < len(names):
        waiting = names[len(found) :]
        ours, theirs = multiprocessing.Pipe(False)
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(waiting, theirs, find or difference))
        process.start()
        theirs.close()
        try:
            while len(found) < len(names):
                name, answer = ours.recv()
                found[name] = answer
        except EOFError:
            found[names[len(found)]] = "the process ended"
        process.join()
    return found


def read_list(is_strict: bool) -> tuple[dict[str, str], set[str]]:
    """Return the faults of the listed operators by name, and the operators that are not compared."""
    sections = tomllib.loads(LISTED.read_text())
    expected = {name: f"not emulated: {of}" for of, names in sections["not emulated"].items() for name in names}
    for section in ("of torch_npu", *["strict mode"] * is_strict):
        expected |= {name: reason for reason, names in sections[section].items() for name in names}
    return expected, {name for names in sections["not compared"].values() for name in names}


def wrongly_listed(found: dict[str, str | None], expected: dict[str, str]) -> dict[str, str]:
    """Return operators whose difference does not begin with the listed one, by name with the difference."""
    wrong = {name: words for name, words in found.items() if words and not words.startswith(expected.get(name, "\n"))}
    return wrong | {name: "equal, and listed" for name in expected if found.get(name) is None}


def found_by_a_process(folder: Path, is_strict: bool, *options: str) -> dict[str, str | None]:
    """Run this module by ``python -m`` and return its results: only a process that has touched no device may fork."""
    file = folder / "found.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.npu_emulator.test_torch_operators", file, *options]
    environment = os.environ | {"NPU_EMULATOR_CAPACITY_MB": "2048", "OMP_NUM_THREADS": "1"}
    environment |= {"NPU_EMULATOR_STRICT": str(int(is_strict))}
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=1500)
    return json.loads(file.read_text())


@pytest.mark.parametrize("is_strict", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "strict"])
def test_operators_equal_the_cpu_or_are_listed_with_their_reason(tmp_path, is_strict):
    """In strict mode this shows which of the documents' demands torch_npu itself violates."""
    found = found_by_a_process(tmp_path, is_strict)
    expected, not_compared = read_list(is_strict)
    assert not_compared | expected.keys() <= operator_list().keys()
    assert wrongly_listed(found, expected) == {}
    assert sum(words is None for words in found.values()) >= (LEAST_EQUAL_IN_STRICT_MODE if is_strict else LEAST_EQUAL)


@pytest.mark.parametrize("samples", ["4", pytest.param("12", marks=pytest.mark.exhaustive)])
def test_strict_mode_takes_what_torch_npu_puts_together(tmp_path, samples):
    """Types and shapes of several tensors: documents are wrong about these more often than about single tensors."""
    found = found_by_a_process(tmp_path, True, "--together", samples)
    assert {name: words for name, words in found.items() if words} == {}
    assert len(found) > 600


def test_mismatched_arguments_detected(monkeypatch):
    class Unrelated:
        dtypes = {torch.float32}
        supports_autograd = False

        def sample_inputs(self, *args, **kwargs):
            yield types.SimpleNamespace(input=torch.ones(2, 4), args=(torch.ones(3, 4), torch.ones(4)), kwargs={})

        def __call__(self, x, other, weight):
            return torch_npu.npu_add_rms_norm(x, other, weight)

    monkeypatch.setenv("NPU_EMULATOR_STRICT", "1")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "0")
    assert "aclnnAddRmsNorm" in unrelated(Unrelated())


def test_mismatched_list_detected():
    found = {
        "a": None,
        "b": None,
        "c": "not emulated: X",
        "d": "not emulated: Y",
        "e": "RuntimeError: new",
        "f": "other",
    }
    expected = {"b": "not emulated: X", "c": "not emulated: X", "d": "not emulated: X", "f": "oth"}
    assert wrongly_listed(found, expected).keys() == {"b", "d", "e"}


def test_an_operator_that_ends_its_process_is_named_and_the_others_go_on(monkeypatch):
    operators = {"first": None, "second": "ends the process", "third": None}
    monkeypatch.setattr(sys.modules[__name__], "operator_list", lambda: operators)
    monkeypatch.setattr(sys.modules[__name__], "difference", lambda op: os._exit(1) if op else None)
    assert differences([*operators]) == {"first": None, "second": "the process ended", "third": None}


def test_wrong_kernel_detected():
    class Wrong:
        dtypes = {torch.float32}
        supports_autograd = True

        def sample_inputs(self, *args, **kwargs):
            yield types.SimpleNamespace(input=torch.ones(2, requires_grad=True), args=(), kwargs={})

        def __call__(self, x):
            return x * (2 if x.is_npu else 3)

    assert "not close" in difference(Wrong())


if __name__ == "__main__":
    _, left_out = read_list(is_strict=False)
    compared = [name for name in operator_list() if name not in left_out]
    find = functools.partial(unrelated, most_samples=int(sys.argv[3])) if len(sys.argv) > 2 else difference
    Path(sys.argv[1]).write_text(json.dumps(differences(compared, find)))
