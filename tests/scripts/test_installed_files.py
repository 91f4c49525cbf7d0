"""Installed files against the hashes of their packages, in a temporary environment and in this one."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from scripts.health_checks import installed_files, node
from scripts.health_checks.installed_files import check_files
from tests.scripts.cluster_files import load_script


@pytest.fixture
def environment(tmp_path) -> Path:
    """Return a virtual environment with verl 0.4.0 of two files, as an installer leaves it."""
    site = tmp_path / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"
    files = {
        "verl/__init__.py": b"x = 1\n",
        "verl/trainer, main/a.py": b"",
        "verl-0.4.0.dist-info/METADATA": b"Name: verl\n",
        "certifi/cacert.pem": b"one authority\n",
    }
    record = ""
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        record += f'"{name}",sha256={digest},{len(content)}\n'
    record += "verl/__pycache__/a.pyc,sha256=abc,1\n../../../bin/verl,sha256=abc,1\nverl-0.4.0.dist-info/RECORD,,\n"
    (site / "verl-0.4.0.dist-info" / "RECORD").write_text(record)
    return tmp_path


def site(environment: Path) -> Path:
    return environment / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"


def check(environment: Path, capsys) -> tuple[int, str]:
    return installed_files.main([str(environment)]), capsys.readouterr().err


def test_fresh_installation_passes(environment, capsys):
    assert check(environment, capsys) == (0, "")
    assert check_files(site(environment)).files == 3


@pytest.mark.parametrize("earlier", [False, True])
def test_authority_of_a_company_may_be_appended(environment, capsys, monkeypatch, earlier):
    if earlier:
        with monkeypatch.context() as patch:
            patch.setattr(installed_files, "_NOT_COMPARED", set())
            assert check(environment, capsys) == (0, "")
    with (site(environment) / "certifi" / "cacert.pem").open("a") as authorities:
        authorities.write("another\n")
    assert check(environment, capsys) == (0, "")


def test_one_byte_that_changed_is_found_and_named(environment, capsys):
    assert check(environment, capsys)[0] == 0
    target = site(environment) / "verl" / "__init__.py"
    target.write_bytes(b"x = 2\n")
    code, said = check(environment, capsys)
    assert code == 2 and said.startswith("error: verl/__init__.py of verl 0.4.0 has been changed")
    assert "start again" in said and said.count("\n") == 1
    # It remains an error until the content is right again, whatever the modification time.
    assert check(environment, capsys)[0] == 2
    target.write_bytes(b"x = 1\n")
    assert check(environment, capsys) == (0, "")


def test_a_file_that_was_only_touched_is_well_and_hashed_once(environment, capsys, monkeypatch):
    check(environment, capsys)
    cache = environment / "stamps" / "files.json"
    os.utime(site(environment) / "verl" / "__init__.py", ns=(5, 5))
    assert check_files(site(environment), cache=cache).hashed == 6
    assert check_files(site(environment), cache=cache).hashed == 0
    monkeypatch.setattr(installed_files, "_digest", lambda *_: pytest.fail("an unchanged file was hashed"))
    assert check(environment, capsys) == (0, "")


def test_a_file_that_is_missing_is_named(environment, capsys):
    check(environment, capsys)
    (site(environment) / "verl" / "trainer, main" / "a.py").unlink()
    assert "verl/trainer, main/a.py of verl 0.4.0 is missing" in check(environment, capsys)[1]


def test_a_package_without_its_list_is_named(environment, capsys):
    (site(environment) / "verl-0.4.0.dist-info" / "RECORD").unlink()
    assert "verl-0.4.0.dist-info/RECORD of verl 0.4.0 is missing" in check(environment, capsys)[1]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_a_cache_that_was_cut_off_is_made_again(environment, capsys, content):
    check(environment, capsys)
    (environment / "stamps" / "files.json").write_bytes(content)
    (site(environment) / "verl" / "__init__.py").write_bytes(b"x = 2\n")
    assert check(environment, capsys)[0] == 2


def test_a_package_that_was_installed_again_is_read_again(environment, capsys):
    check(environment, capsys)
    other = site(environment) / "verl" / "__init__.py"
    other.write_bytes(b"y = 1\n")
    record = site(environment) / "verl-0.4.0.dist-info" / "RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"y = 1\n").digest()).decode().rstrip("=")
    text = record.read_text().splitlines(keepends=True)
    record.write_text("".join([f"verl/__init__.py,sha256={digest},6\n", *text[1:]]))
    assert check(environment, capsys) == (0, "")


def test_some_packages_do_not_make_the_others_forgotten(environment):
    cache = environment / "files.json"
    shutil.copytree(site(environment) / "verl-0.4.0.dist-info", site(environment) / "torch-2.5.1.dist-info")
    check_files(site(environment), cache=cache)
    assert check_files(site(environment), ["verl"], cache).packages == 1
    assert check_files(site(environment), cache=cache).hashed == 0
    with pytest.raises(ValueError, match="vllm is not installed"):
        check_files(site(environment), ["vllm"])


def test_the_doctor_finds_an_edited_upstream(environment, monkeypatch):
    """This environment's upstreams pass the check; the edited one does not."""
    found = list(node.installed_files())
    assert [finding.state for finding in found] == ["ok"] and "vllm-ascend" in found[0].detail
    (site(environment) / "verl" / "__init__.py").write_bytes(b"x = 2\n")

    class Installed:
        def locate_file(self, path):
            return site(environment) / path

        def read_text(self, name):
            return name

    def distribution(name):
        if name != "verl":
            raise node.importlib.metadata.PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(node.importlib.metadata, "distribution", distribution)
    (finding,) = node.installed_files()
    assert finding.state == "BAD" and finding.remedy == "install verl again" and "verl/__init__.py" in finding.detail


def test_the_script_needs_no_package(environment):
    """It runs in isolated mode and without site-packages."""
    assert load_script("scripts/health_checks/installed_files.py").main([str(environment)]) == 0
