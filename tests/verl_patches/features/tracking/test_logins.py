"""Whether a tracker would start without asking for a login, for each relevant variable and file on its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from verl_patches.features.tracking.logins import has_swanlab_login, has_variable, has_wandb_login

LOGIN = "machine {} login user password 0123456789abcdef\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """Return a home folder without any login, in an environment without login variables."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "SWANLAB_")) or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("given, found", [("Offline", True), ("disabled", True), ("online", False), ("", False)])
def test_a_variable_has_one_of_some_values_in_any_case(given, found, monkeypatch):
    monkeypatch.setenv("MODE_OF_A_TEST", given)
    assert has_variable("MODE_OF_A_TEST", "offline", "disabled") is found
    assert has_variable("MODE_OF_A_TEST") is bool(given) and not has_variable("NO_VARIABLE_OF_A_TEST")


@pytest.mark.parametrize(
    "asked, name, value",
    [(has_wandb_login, "WANDB_MODE", mode) for mode in ("offline", "disabled", "dryrun")]
    + [(has_wandb_login, "WANDB_API_KEY", "key"), (has_swanlab_login, "SWANLAB_API_KEY", "key")]
    + [(has_swanlab_login, "SWANLAB_MODE", mode) for mode in ("local", "offline", "disabled")],
)
def test_a_variable_is_enough(asked, name, value, monkeypatch):
    assert not asked()
    monkeypatch.setenv(name, "online" if name.endswith("MODE") else "")
    assert not asked()
    monkeypatch.setenv(name, value)
    assert asked()


@pytest.mark.parametrize("file", [".netrc", "_netrc", "elsewhere"])
@pytest.mark.parametrize("server, host", [(None, "api.wandb.ai"), ("https://wandb.example/path", "wandb.example")])
def test_a_login_for_the_server_in_use_is_enough(file, server, host, home, monkeypatch):
    if server is not None:
        monkeypatch.setenv("WANDB_BASE_URL", server)
    if file == "elsewhere":
        monkeypatch.setenv("NETRC", "~/elsewhere")
    (home / file).write_text(LOGIN.format("other.example"))
    assert not has_wandb_login()
    (home / file).write_text(LOGIN.format("other.example") + LOGIN.format(host))
    assert has_wandb_login()


def test_a_file_that_cannot_be_read_hides_no_other(home, monkeypatch):
    (home / ".netrc").write_text("no such word\n")
    (home / "_netrc").write_text(LOGIN.format("api.wandb.ai"))
    assert has_wandb_login()


@pytest.mark.parametrize("folder", [".swanlab", "elsewhere"])
def test_swanlab_keeps_its_login_in_its_folder(folder, home, monkeypatch):
    if folder == "elsewhere":
        monkeypatch.setenv("SWANLAB_SAVE_DIR", "~/elsewhere")
    (home / folder).mkdir()
    assert not has_swanlab_login()
    (home / folder / ".netrc").write_text("")
    assert has_swanlab_login()
