"""Processes of tests collect garbage less often: `tests/interpreter` is on their path."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreter"


def test_processes_of_tests_have_its_thresholds():
    program = "import gc, sitecustomize; print(sitecustomize.__file__, gc.get_threshold()[0])"
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert said.split() == [str(FOLDER / "sitecustomize.py"), "50000"]
    test_script = (FOLDER.parents[1] / "scripts" / "test.sh").read_text()
    assert 'PYTHONPATH="$project_root:$project_root/tests/interpreter"' in test_script
