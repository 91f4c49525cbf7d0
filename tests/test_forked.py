"""Test programs are forked from a process that has already imported their modules."""

import os
import subprocess
from pathlib import Path

import pytest

from post_training.processes.descendants import runs, wait_until
from tests import forked
from tests.ranks import run_ranks

IMPORTED = ("colorsys",)
SAYS_WHAT_IT_FINDS = """
import os, sys
print("colorsys" in sys.modules, sys.argv[1:], os.environ["GIVEN"], os.getcwd(), __name__)
sys.exit(3)
"""
# A program that never ends, run by itself and as ranks.
STAYS = """
import os, pathlib, time

def main(folder):
    (folder / str(os.getpid())).touch()
    while True:
        time.sleep(1)

if __name__ == "__main__":
    main(pathlib.Path("."))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of the programs, in which they find modules."""
    (tmp_path / "says.py").write_text(SAYS_WHAT_IT_FINDS)
    (tmp_path / "stays.py").write_text(STAYS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(imported: tuple[str, ...], **variables: str) -> list[str]:
    """Return the program's output in two parts: whether the module was already imported, and the rest."""
    environment = os.environ | {"GIVEN": "a value"} | variables
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = forked.start(imported, "says", "one", "two words", environment=environment, **outputs)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 3, output
    return output.split(maxsplit=1)


@pytest.mark.parametrize(
    ("imported", "variables", "is_forked"),
    [(IMPORTED, {}, True), ((), {}, False), (IMPORTED, {"OMP_NUM_THREADS": "7"}, False)],
    ids=["forked", "nothing imported", "another setting"],
)
def test_program_runs_alike_forked_or_not(folder, imported, variables, is_forked):
    found, rest = said(imported, **variables)
    assert found == str(is_forked)
    assert rest == f"['one', 'two words'] a value {folder} __main__\n"


@pytest.mark.parametrize("of_this_tree", [True, False])
def test_shared_template_is_that_of_the_tree(monkeypatch, of_this_tree):
    environment = {"NPU_EMULATOR_STREAM_SEED": "another than here"}
    monkeypatch.setenv(forked.SHARED, "")
    monkeypatch.setattr(forked, "_start_template", lambda imported: f"client of {imported[0]}")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(*environment.popitem())
        forked.share_templates(without=())
        environment = dict(os.environ)
    monkeypatch.setenv(forked.SHARED, environment[forked.SHARED])
    if not of_this_tree:
        monkeypatch.setattr(forked, "_OWNER", ["/another/tree", forked._OWNER[1]])
    expected = "client of torch" if of_this_tree else None
    assert forked._client(forked.PYTORCH, environment) == expected


def test_fork_finds_the_tools_of_cann(folder):
    """PATH is as after an import of torch_npu, whatever the tests' process has imported."""
    (folder / "finds.py").write_text("import shutil\nprint(shutil.which('msprof'))")
    environment = os.environ | {"PATH": "/usr/bin:/bin"}
    process = forked.start(IMPORTED, "finds", environment=environment, stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=600)
    assert output.strip().endswith("/toolkit/bin/msprof")


def test_fork_says_what_it_cost(folder, monkeypatch):
    monkeypatch.setenv(forked.SPENT, str(folder / "spent"))
    said(IMPORTED)
    said(())
    (spent,) = (folder / "spent").read_text().split()
    assert 0 <= float(spent) < 60


def pids(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]


def test_killed_process_takes_its_fork_along(folder):
    process = forked.start(IMPORTED, "stays", environment=os.environ)
    assert wait_until(lambda: bool(pids(folder)), 600)
    process.kill()
    process.wait()
    assert wait_until(lambda: not any(map(runs, pids(folder))), 600)


@pytest.mark.parametrize("imported", [IMPORTED, ()], ids=["forked", "new"])
def test_ranks_end_when_their_time_is_over(folder, imported):
    with pytest.raises(AssertionError, match="stays did not end within 5 s"):
        run_ranks("stays", 2, folder, timeout=5, imported=imported)
    assert wait_until(lambda: not any(map(runs, pids(folder))), 600)
