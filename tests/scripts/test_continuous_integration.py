"""What a fork's CI and pre-commit run is what scripts/test.sh runs, and all of it is there."""

import re
import shlex
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOL = re.compile(r'^\s*"\$tools/([\w-]+)"(?P<arguments>.*)$', re.MULTILINE)


def checks() -> list[str]:
    """The checks of scripts/test.sh before the tests, as `tool subcommand`."""
    found = [
        (match[1], match["arguments"].split()) for match in TOOL.finditer((ROOT / "scripts" / "test.sh").read_text())
    ]
    return [tool if tool != "ruff" else f"ruff {arguments[0]}" for tool, arguments in found]


def hooks() -> list[dict]:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in repositories] == ["local"], "a hook from elsewhere would be downloaded"
    return repositories[0]["hooks"]


def missing_commands(workflow: dict) -> list[str]:
    """Scripts that a workflow runs and that are not in the repository."""
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


def test_a_script_that_is_not_there_is_noticed():
    gone = "bash scripts/gone.sh"
    assert missing_commands({"jobs": {"test": {"steps": [{"uses": "a"}, {"run": gone}]}}}) == [gone]
