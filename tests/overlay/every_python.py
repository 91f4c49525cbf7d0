"""Compare the fingerprints of upstream's functions on every Python from 3.9 to 3.13.

    python -m tests.overlay.every_python [--every N]

Takes every function (or those of every Nth file) of verl, vllm-ascend and megatron-core as they are installed here, and
says for each Python that it finds how many fingerprints it made and their common digest. Exit code 0: all five Pythons
agree; 1: they do not; 2: not all of them are on this machine (`uv python install 3.9 3.10 3.11 3.12 3.13`).
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

OVERLAY = Path(__file__).resolve().parents[2] / "overlay"
VERSIONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
PACKAGES = ("verl", "vllm_ascend", "megatron")
SCRIPT = """
import ast, hashlib, json, sys
sys.path.insert(0, sys.argv[1])
from fingerprint import fingerprint
total, digest, failed = 0, hashlib.sha256(), []
for path in json.load(sys.stdin):
    try:
        tree = ast.parse(open(path, "rb").read())
    except SyntaxError:
        failed.append(path)
        continue
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            total += 1
            digest.update(repr(fingerprint([node])).encode())
print(json.dumps([total, digest.hexdigest(), failed]))
"""


def interpreters() -> dict[str, str]:
    """Return the Pythons of VERSIONS that run on this machine, by version: on the path, of pyenv, or of uv."""
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin"))
    places = [*os.environ.get("PATH", "").split(os.pathsep), *map(str, pyenv)]
    found: dict[str, str] = {}
    for version in VERSIONS:
        for file in [*(os.path.join(place, f"python{version}") for place in places), _of_uv(version)]:
            if version not in found and file and os.path.exists(file) and _runs(file, version):
                found[version] = file
    return found


def _of_uv(version: str) -> str:
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not os.path.exists(uv):
        return ""
    command = [uv, "python", "find", "--no-project", version]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _runs(file: str, version: str) -> bool:
    command = [file, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() == version


def source_files() -> list[str]:
    """Return all Python files of the packages as they are installed here."""
    specs = [importlib.util.find_spec(package) for package in PACKAGES]
    folders = [Path(folder) for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return sorted(str(file) for folder in folders for file in folder.rglob("*.py"))


def fingerprints(pythons: dict[str, str], files: list[str]) -> dict[str, tuple[int, str, list[str]]]:
    """Return for each Python its number of fingerprints, their digest, and the files that it could not read."""
    started = {
        version: subprocess.Popen(
            [python, "-c", SCRIPT, str(OVERLAY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for version, python in pythons.items()
    }
    answers = {version: process.communicate(json.dumps(files))[0] for version, process in started.items()}
    return {version: tuple(json.loads(answer)) for version, answer in answers.items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.overlay.every_python")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth file only")
    pythons, files = interpreters(), source_files()[:: parser.parse_args().every]
    answers = fingerprints(pythons, files)
    for version, (total, digest, failed) in answers.items():
        print(
            f"Python {version}: {total} functions in {len(files)} files, digest {digest[:16]}, {len(failed)} unreadable"
        )
    agree = len({json.dumps(answer) for answer in answers.values()}) == 1 and all(a[0] for a in answers.values())
    missing = [version for version in VERSIONS if version not in pythons]
    print("all agree" if agree else "they differ")
    if missing:
        print(f"not checked, because not on this machine: Python {', '.join(missing)}", file=sys.stderr)
    return 1 if not agree else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
