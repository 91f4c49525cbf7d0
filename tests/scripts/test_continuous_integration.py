"""A fork's CI and pre-commit run the same checks as scripts/test.sh, with scripts that exist."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOL = re.compile(r'^\s*(?:bash \S+/together\.sh |--and |--then )?"\$tools/([\w-]+)"(?P<arguments>.*)$', re.MULTILINE)


def checks() -> list[str]:
    """Return the checks that scripts/test.sh runs before the tests, as `tool subcommand`."""
    found = [
        (match[1], match["arguments"].split()) for match in TOOL.finditer((ROOT / "scripts" / "test.sh").read_text())
    ]
    return [tool if tool != "ruff" else f"ruff {arguments[0]}" for tool, arguments in found]


def hooks() -> list[dict]:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in repositories] == ["local"], "a hook from elsewhere would be downloaded"
    return repositories[0]["hooks"]


def missing_commands(workflow: dict) -> list[str]:
    """Return the scripts that a workflow runs and the repository does not have."""
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    return [command for command in commands if not (ROOT / shlex.split(command)[1]).is_file()]


def test_pre_commit_runs_every_check_of_the_test_command():
    ran = []
    for hook in hooks():
        command, *arguments = shlex.split(hook["entry"])
        assert hook["language"] == "system" and (ROOT / command).is_file(), hook
        ran.append(f"ruff {arguments[0]}" if command.endswith("/ruff") else Path(command).name)
    assert len(checks()) == 5 and sorted(ran) == sorted(checks())


def test_the_workflow_runs_scripts_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert missing_commands(workflow) == []
    ran = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in ran and "bash scripts/test.sh --fast" in ran


def test_missing_script_detected():
    gone = "bash scripts/gone.sh"
    assert missing_commands({"jobs": {"test": {"steps": [{"uses": "a"}, {"run": gone}]}}}) == [gone]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs .ci/run with test results `codes`, and returns its end and the tested stacks."""
    for folder in (".ci", "scripts/lib"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "scripts/test.sh").write_text('echo "$*" >>ran; exit "$((CODE_$2))"\n')
    (tmp_path / "df").write_text("#!/bin/bash\nprintf '%s\\n' Avail $FREE\n")
    (tmp_path / "df").chmod(0o755)

    def start(*codes: int, free: int = 10**6, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        given = {f"CODE_{stack}": str(code) for stack, code in zip(("2025", "2026"), codes, strict=True)}
        environment = os.environ | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FREE": str(free)} | variables
        ended = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return ended, (tmp_path / "ran").read_text().splitlines()

    return start


BOTH = ["--stack 2025", "--stack 2026"]


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ((0, 0), 0, r"2025: passed after 0 min \d s\n  2026: passed after 0 min \d s\n"),
        ((1, 0), 1, r"2025: FAILED with exit code 1 after .*\n  2026: passed after .*\n"),
        ((0, 2), 1, r"2025: passed after .*\n  2026: FAILED with exit code 2 after .*\n"),
    ],
)
def test_both_stacks_run_whatever_becomes_of_the_first(run, codes, code, said):
    ended, ran = run(*codes)
    assert ended.returncode == code and ran == BOTH, ended.stderr
    assert re.search(rf"Tests of the stacks:\n  {said}$", ended.stdout), ended.stdout


@pytest.mark.parametrize("codes", [(0, 0), (1, 0)])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"free": 12000}, r"2026: NOT RUN: \.venv-2026/ takes 9\.5 GB, .*; the disk has 12\.0 GB left"),
        ({"SECONDS": "5000"}, "2026: NOT RUN: those of the first stack ended after 83 minutes"),
    ],
)
def test_stack_without_space_or_time_left_out_and_named(run, codes, variables, said):
    ended, ran = run(*codes, **variables)
    assert ended.returncode == codes[0] and ran == BOTH[:1]
    assert re.search(said, ended.stdout), ended.stdout


def test_other_stack_begun_late_is_tested_by_its_fast_tier(run):
    ended, ran = run(0, 1, SECONDS="2500")
    assert ended.returncode == 1 and ran == [*BOTH[:1], "--stack 2026 --fast"]
    said = r"2026: FAILED with exit code 1 after .*; only its fast tier, since the first stack took 41 minutes\n$"
    assert re.search(said, ended.stdout), ended.stdout


def test_environment_that_is_there_needs_no_space(run, tmp_path):
    (tmp_path / ".venv-2026").mkdir()
    assert run(0, 0, free=12000)[1] == BOTH
