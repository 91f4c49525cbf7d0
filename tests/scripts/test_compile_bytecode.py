"""Installed packages are compiled where a rehearsal imports them, and nothing keeps the others from being imported."""

import subprocess
import sys
from pathlib import Path

from rehearsal.plan import ROOT

PROGRAM = ROOT / "scripts" / "lib" / "compile_bytecode.py"
COMPILED = ("vllm/engine.py", "transformers/generation.py", "attestation/test.py")
LEFT_OUT = ("vllm/tests/test_engine.py", "transformers/models/bert.py", "mypy/main.py")
# Runs the program as if packages were installed in another folder than the interpreter's.
ELSEWHERE = """
import runpy, sys, sysconfig
sysconfig.get_path = lambda name: sys.argv[2]
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_all_but_tests_unused_models_and_tools_compiled(tmp_path):
    packages = tmp_path / "tests" / "site-packages"  # a checkout may lie in a folder of such a name
    for name in (*COMPILED, *LEFT_OUT):
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("answer = 42\n")
    (packages / "vllm" / "template.py").write_text("{{ no Python }}\n")
    subprocess.run([sys.executable, "-c", ELSEWHERE, PROGRAM, packages], check=True, timeout=300)
    found = {f"{path.parents[1].relative_to(packages)}/{path.name}" for path in packages.rglob("*.pyc")}
    suffix = f".{sys.implementation.cache_tag}.pyc"
    assert found == {str(Path(name).with_suffix(suffix)) for name in COMPILED}
