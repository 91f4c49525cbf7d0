"""torch_npu 2.10.0.post4's own tests of operators that the stack reaches: each passes, or is listed with a reason."""

import shutil
from pathlib import Path

import pytest

from tests.stack_2026.upstream.reached import reached_operators
from tests.upstream import projects
from tests.upstream.op_plugin import Outcome, calls_reached, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

# The tag v26.1.0-pytorch2.10.0, whose commit the package names (torch_npu.version.git_version).
CHECKOUT = "pytorch-v26.1.0"
PROJECT = projects.Project(
    CHECKOUT, ("test/custom_ops/test_*.py", "test/npu/test_*.py"), (f"{CHECKOUT}/test", str(projects.STARTED))
)
TIME_LIMIT = 900  # seconds per file
# It compares traces of graphs as text, with the package expecttest.
LEFT_OUT = {"test_functionalization.py"}
# Not investigated yet.
LEFT_OUT |= {"test_npu.py", "test_npu_format.py", "test_serialization.py", "test_storage.py", "test_tensor.py"}
LEFT_OUT |= {"test_swapped_memory_allocator.py"}
CANNOT = {
    "test_aclop_op_with_multi_device": "OPS function error: Maximum",  # from CANN's older interface
    # With a scale of 128, scores are in the thousands: its reference rounds them to 16 bits, the emulator only rounds
    # the result.
    "test_opapi_op_with_multi_device": "result error",
}


@pytest.fixture(scope="module")
def outcomes(upstream: Path, tmp_path_factory) -> list[Outcome]:
    """Outcomes of the files that call an operator reached by the stack, run from a copy."""
    own = tmp_path_factory.mktemp("torch_npu")
    assert (upstream / CHECKOUT / "test").is_dir(), f"{upstream} lacks {CHECKOUT}"
    shutil.copytree(upstream / CHECKOUT / "test", own / CHECKOUT / "test")
    reached = reached_operators(upstream, tmp_path_factory.mktemp("sources"))
    tests = [test for test in projects.files(own, PROJECT) if calls_reached(test, reached)]
    return [projects.run_file(test, own, PROJECT, TIME_LIMIT) for test in tests if test.name not in LEFT_OUT]


def test_every_test_passes_but_those_that_cannot(outcomes):
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed, in {len(outcomes)} files")
    assert passed >= 15
    failed = {name.rpartition("::")[2]: words for outcome in outcomes for name, words in outcome.failed.items()}
    assert {name: failed.get(name, "listed, and passes") for name in failed.keys() ^ CANNOT.keys()} == {}
    assert {name: words for name, words in failed.items() if CANNOT[name] not in words} == {}
