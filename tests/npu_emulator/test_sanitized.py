"""The emulated CANN with AddressSanitizer and UndefinedBehaviorSanitizer: operators' tests, and calls drawn at random.

Only the emulator's own code is instrumented. ATen below it is not, apart from the memory that it allocates and copies.
"""

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.mutations.workbench import COMPILE
from tests.npu_emulator.engine_process import ROOT
from tests.npu_emulator.test_random_calls import draw

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(7200)]

# Types of objects (vptr) are torch's, whose libraries hide them. Without optimization it is built much sooner.
COMPILER = """#!/bin/sh
exec c++ "$@" -fsanitize=address,undefined -fno-sanitize=vptr -fno-omit-frame-pointer -O0 -g1
"""
WATCHED = ("tests/npu_emulator/operators", "tests/npu_emulator/test_torch_operators.py")
PLANTED = {
    "a tensor is destroyed twice": (
        "heap-use-after-free",
        "cann.aclDestroyTensor(tensor); cann.aclDestroyTensor(tensor)",
    ),
    "a bool is neither true nor false": (
        "load of value 2, which is not a valid value for type 'bool'",
        "scalar = pointer(cann.aclCreateScalar(b'\\2', 12)); cann.aclnnInplaceFillScalarGetWorkspaceSize("
        "tensor, scalar, ctypes.byref(pointer()), ctypes.byref(pointer()))",
    ),
}
MISUSE = """
import ctypes
import torch
from npu_emulator import engine

cann, pointer = engine.library(), ctypes.c_void_p
cann.aclCreateTensor.restype = cann.aclCreateScalar.restype = ctypes.c_void_p
memory, one = ctypes.create_string_buffer(8), (ctypes.c_int64 * 1)(1)
size = ctypes.c_uint64(1)
tensor = pointer(cann.aclCreateTensor(one, size, 0, one, ctypes.c_int64(0), 2, one, size, memory))
"""


def runtime(name: str) -> str:
    """Return the path of the compiler's library with this name."""
    return subprocess.run(
        ["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory) -> dict[str, str]:
    """Variables with which Python finds a sanitized emulator, and ends at the first error."""
    sources, packages = (tmp_path_factory.mktemp(name) for name in ("sources", "packages"))
    shutil.copytree(ROOT / "npu_emulator", sources, dirs_exist_ok=True, ignore=shutil.ignore_patterns("build"))
    shutil.copytree(sources / "src" / "npu_emulator", packages / "npu_emulator")
    command = [sys.executable, "-c", COMPILE, packages / "npu_emulator"]
    compiler = sources / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    built = {**os.environ, "CXX": shlex.quote(str(compiler))}
    subprocess.run(command, cwd=sources, env=built, check=True, capture_output=True)
    return {
        "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}",
        # libstdc++ too: the sanitizer looks for what throws exceptions before torch has brought it.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",  # torch and Python keep much to their end
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_seen(sanitized, planted):
    words, code = PLANTED[planted]
    command = [sys.executable, "-W", "ignore", "-c", MISUSE + code]
    ended = subprocess.run(command, env=os.environ | sanitized, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode and words in ended.stderr


def test_operators_stay_within_their_memory(sanitized):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=3600", *WATCHED]
    environment = os.environ | sanitized | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert not ended.returncode, ended.stdout[-4000:] + ended.stderr[-4000:]
    print(ended.stdout.splitlines()[-1])


def test_random_calls_stay_within_their_memory(sanitized, tmp_path):
    assert draw(tmp_path / "outcomes.json", seed=3, calls=20_000, seconds=7000, **sanitized)
