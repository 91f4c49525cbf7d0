"""`pip wheel .` makes a wheel, and the overlay that is in it passes its own tests with nothing else of this project."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.scripts.test_contributing import copied

ROOT = Path(__file__).resolve().parents[2]
# These look at the patches and not at the engine.
OF_THE_PATCHES = ("test_real_*.py", "test_wheel.py", "order_program.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building leaves files beside the sources; nothing is downloaded."""
    sources, folder = copied(tmp_path_factory.mktemp("sources")), tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", ".", *options], cwd=sources, check=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    rooms = {"overlay", "post_training", "rehearsal", *(path.name for path in ROOT.glob("*_patches"))}
    wanted = {name for name in listed if name.partition("/")[0] in rooms and name != "verl_patches/scripts"}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert wanted and held == wanted


@pytest.mark.exhaustive
def test_its_overlay_passes_its_own_tests_alone(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if name.startswith("overlay/")])
    tests = tmp_path / "tests" / "overlay"
    shutil.copytree(ROOT / "tests" / "overlay", tests, ignore=shutil.ignore_patterns(*OF_THE_PATCHES, "__pycache__"))
    (tmp_path / "conftest.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(tests)]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-3000:] + ran.stderr[-1000:]
