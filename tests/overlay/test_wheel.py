"""`pip wheel .` makes a wheel of the patches and the packages that they depend on."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.scripts.test_contributing import copied

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, since building leaves files beside the sources; nothing is downloaded."""
    sources, folder = copied(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", ".", *options], cwd=sources, check=True, timeout=600)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    packages = {"overlay", "post_training", "rehearsal", *(path.name for path in ROOT.glob("*_patches"))}
    wanted = {name for name in listed if name.partition("/")[0] in packages and name != "verl_patches/scripts"}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert wanted and held == wanted
