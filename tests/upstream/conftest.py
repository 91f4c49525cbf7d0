"""The packages of the checkouts that train, with MindSpeed's kernels compiled."""

import fcntl
from pathlib import Path

import pytest

from tests.upstream import checkouts
from tests.upstream.kernels import compile_kernels


@pytest.fixture(scope="session")
def packages(upstream: Path, pytestconfig: pytest.Config) -> Path:
    """The folder to import from. It and the compiled kernels are kept between runs of pytest, which takes turns."""
    lacking = checkouts.missing(upstream)
    if lacking:
        pytest.fail(f"{upstream} has no {', '.join(lacking)}")
    kept = pytestconfig.cache.mkdir("upstream")
    with (kept / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        folder = checkouts.assemble_once(upstream, kept)
        compile_kernels(checkouts.environment(folder))
    return folder
