"""scripts/copy_into.sh on the checkouts at the cluster's pins: copying, copying again, and undoing without a trace."""

import shutil
from pathlib import Path

import pytest

from tests.scripts.test_copy_into import clean, copy_into, git

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "only"),
    [("verl", ()), ("vllm-ascend", ("--only", "vllm-ascend")), ("Megatron-LM", ("--only", "megatron"))],
)
def test_a_checkout_takes_the_patches_and_gives_them_back(upstream: Path, tmp_path: Path, name, only):
    if not (upstream / name).is_dir():
        pytest.skip(f"{name} is not among the checkouts")
    fork = shutil.copytree(upstream / name, tmp_path / name, ignore=shutil.ignore_patterns(".git"), symlinks=True)
    git(fork, "init", "-q")
    git(fork, "add", "-A", "--force")
    git(fork, "commit", "-qm", "all")
    assert "overlay check is clean" in copy_into(fork, *only)
    assert "is up to date" in copy_into(fork, *only)
    copy_into(fork, "--undo")
    assert clean(fork)
