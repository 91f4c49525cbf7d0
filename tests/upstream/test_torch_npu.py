"""torch_npu's own tests of the operators that the stack reaches: each passes, or is listed here with the reason."""

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.upstream import projects
from tests.upstream.op_plugin import Outcome, calls_reached, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PROJECT = projects.PROJECTS["torch_npu"]
FOLDERS = ("test/custom_ops/", "test/npu/")
TIME_LIMIT = 900  # seconds for a file
# Compares the text of graphs with the package expecttest; another torch writes one more result in their last line.
# expecttest must not be installed here: Dynamo then imports a test module of torch's that fails behind
# transfer_to_npu.
LEFT_OUT = {"test_functionalization.py"}
CANNOT = {
    # An operator that nothing here reaches, in a file that also tests one that is reached.
    "test_aclop_op_with_multi_device": "Maximum",
    # With a scale of 128, scores are thousands: the reference rounds them to 16 bits, the emulator once at the end.
    "test_opapi_op_with_multi_device": "result error",
}


@pytest.fixture(scope="module")
def outcomes(upstream: Path, tmp_path_factory) -> list[Outcome]:
    """Return the outcome of each file that calls an operator which the pinned code bases reach, run from a copy."""
    own = tmp_path_factory.mktemp("torch_npu")
    assert (upstream / "pytorch" / "test").is_dir(), f"{upstream} lacks pytorch"
    shutil.copytree(upstream / "pytorch" / "test", own / "pytorch" / "test")
    tests = [
        test for test in projects.files(own, PROJECT, FOLDERS) if calls_reached(test) and test.name not in LEFT_OUT
    ]
    return [projects.run_file(test, own, PROJECT, TIME_LIMIT) for test in tests]


def test_every_test_passes_but_those_that_cannot(outcomes):
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed, in {len(outcomes)} files")
    failed = {name.rpartition("::")[2]: words for outcome in outcomes for name, words in outcome.failed.items()}
    assert {name: failed.get(name, "listed, and passes") for name in failed.keys() ^ CANNOT.keys()} == {}
    assert {name: words for name, words in failed.items() if CANNOT[name] not in words} == {}


def test_the_files_are_those_of_operators(outcomes):
    folders = Counter(Path(outcome.file).parent.name for outcome in outcomes)
    assert folders["custom_ops"] >= 6 and folders["npu"] >= 4
    assert sum(outcome.passed > 0 for outcome in outcomes) >= 9
