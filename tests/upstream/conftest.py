"""The packages for training from the checkouts, with MindSpeed's kernels compiled."""

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.upstream import checkouts
from tests.upstream.kernels import compile_kernels


@pytest.fixture(scope="session")
def packages(upstream: Path, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder to import from.

    The folder and the compiled kernels are kept between runs of pytest, which use them in turn. Started processes find
    a copy of the kernels, because MindSpeed removes all of them if it is imported while another process loads one.
    """
    lacking = checkouts.missing(upstream)
    if lacking:
        pytest.fail(f"{upstream} has no {', '.join(lacking)}")
    kept = pytestconfig.cache.mkdir("upstream")
    own = tmp_path_factory.mktemp("kernels")
    with (kept / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        folder = checkouts.assemble_once(upstream, kept)
        compiled = folder.with_suffix(".extensions")
        compile_kernels(checkouts.environment(folder), compiled)
        shutil.copytree(compiled, own, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(own))
        yield folder
