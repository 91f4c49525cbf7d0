"""scripts/lib/documentation.sh with stub commands on PATH: what it installs, when, and what runs without it."""

from pathlib import Path

import pytest

from tests.scripts.cluster_files import ROOT
from tests.scripts.test_environment import Machine

ENSURE = """
set -euo pipefail
source scripts/lib/terminal.sh
source scripts/lib/environment.sh
source scripts/lib/documentation.sh
documentation_ensure "$PWD"
"""
INSTALLATION = ["venv", "pip", "packages"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def ensure(machine: Machine) -> list[str]:
    done = machine.run("bash", "-c", ENSURE)
    assert done.returncode == 0, done.stderr
    return machine.take_calls()


def test_site_is_installed_once_and_beside_the_environment(machine: Machine) -> None:
    assert ensure(machine) == INSTALLATION
    assert ensure(machine) == []
    assert (machine.root / ".venv.docs" / "stamp").exists() and not (machine.root / ".venv").exists()


@pytest.mark.parametrize(("lock", "again"), [("docs", INSTALLATION), ("bootstrap", INSTALLATION), ("runtime", [])])
def test_changed_lock_installs_the_site_again(machine: Machine, lock: str, again: list[str]) -> None:
    ensure(machine)
    (machine.root / "requirements" / f"{lock}.lock").write_text("other\n")
    assert ensure(machine) == again


def test_failed_installation_repeated(machine: Machine) -> None:
    (machine.tools / "break-uv").touch()
    failed = machine.run("bash", "-c", ENSURE)
    assert failed.returncode == 2 and 'stopped at "installing MkDocs"' in failed.stderr
    machine.take_calls()
    (machine.tools / "break-uv").unlink()
    assert ensure(machine) == INSTALLATION


def test_rehearsal_needs_no_site() -> None:
    """Its set-up stays short: only the tests and docs.sh install the site's packages."""
    users = [path.name for path in (ROOT / "scripts").rglob("*.sh") if "documentation_ensure" in path.read_text()]
    assert sorted(users) == ["docs.sh", "documentation.sh", "test.sh"]
