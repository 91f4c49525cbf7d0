"""Make the wheel npu-emulator-cann: an emulated CANN for the torch_npu that pip installs beside it.

    python make_wheel.py [--torch-npu FOLDER] [--out FOLDER] [--jobs N]

`--torch-npu` is the folder that torch_npu's own wheel is installed in, by default where this Python would import it
from. The wheel goes into `--out` (``dist``). It is for machines like this one, by processor and C library, and for
every Python, since nothing in it is compiled against Python. It takes the package ``wheel``, and what `build.py` needs.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

from build import CORE, ROOT, build_engine, put_package
from wheel.wheelfile import WheelFile

PROJECT = ROOT.parent
SOURCES = PROJECT / "src"
NAME = "npu_emulator_cann"
TORCH, TORCH_NPU = "2.5.1", "2.5.1.post1"


def installed_torch_npu() -> Path:
    """Where this Python would import torch_npu from, without importing it; the working folder where it would not."""
    found = importlib.util.find_spec("torch_npu")
    return Path(found.origin).parents[1] if found and found.origin else Path.cwd()


def check_machine() -> None:
    """Ends the process with one sentence where a real NPU is."""
    sys.path.insert(0, str(SOURCES / "npu_emulator"))
    from presence import refuse_real_npu

    try:
        refuse_real_npu(distribution=None)
    except RuntimeError as error:
        sys.exit(f"error: {error}.")


def assemble(torch_npu: Path, stage: Path, jobs: int | None) -> None:
    """Everything that the wheel holds except what describes it, in `stage`."""
    shutil.copytree(ROOT / "distribution", stage, ignore=shutil.ignore_patterns("__pycache__"))
    put_package(stage)
    shutil.copy(SOURCES / "npu_emulator_engine.py", stage)
    build_engine(torch_npu, stage / NAME, stage / NAME / "packages", jobs)


def describe(stage: Path, tag: str, version: str) -> None:
    """What installers read: name, requirements, licence."""
    folder = stage / f"{NAME}-{version}.dist-info"
    (folder / "licenses").mkdir(parents=True)
    for name in ("LICENSE", "NOTICE"):
        shutil.copy(PROJECT.parent / name, folder / "licenses")
    lines = [
        "Metadata-Version: 2.4",
        "Name: npu-emulator-cann",
        f"Version: {version}",
        "Summary: An Ascend NPU in software beneath the published torch_npu: CANN, HCCL and ATB emulated",
        "Requires-Python: >=3.10",
        f"Requires-Dist: torch=={TORCH}",
        f"Requires-Dist: torch-npu=={TORCH_NPU}",
        "License-File: LICENSE",
        "License-File: NOTICE",
        "Description-Content-Type: text/markdown",
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\n" + (PROJECT / "README.md").read_text())
    (folder / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: make_wheel\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-npu", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("dist"))
    parser.add_argument("--jobs", type=int, metavar="N", default=os.cpu_count())
    given = parser.parse_args()
    check_machine()
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    tag = sysconfig.get_platform().replace("-", "_")
    given.out.mkdir(parents=True, exist_ok=True)
    made = given.out / f"{NAME}-{version}-py3-none-{tag}.whl"
    with tempfile.TemporaryDirectory() as scratch:
        stage = Path(scratch, "stage")
        assemble((given.torch_npu or installed_torch_npu()).resolve(), stage, given.jobs)
        describe(stage, tag, version)
        with WheelFile(made, "w") as archive:
            archive.write_files(str(stage))
        size = (stage / NAME / "lib" / CORE).stat().st_size
    print(f"{made}: {made.stat().st_size / 2**20:.1f} MiB, of which {CORE} is {size / 2**20:.1f} MiB unpacked")


if __name__ == "__main__":
    main()
