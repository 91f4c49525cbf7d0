"""Every command of docs/first-hour.md is executed: on emulated dies, by a look at its result, or with stand-ins."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.post_training.plan.test_fsdp import NAMED, NAMES, QWEN
from tests.scripts.test_documents import commands
from tests.scripts.test_one_node import ROOT

GUIDES = [ROOT / "docs" / f"first-hour{language}.md" for language in ("", ".zh")]
LAUNCHER = r"bash scripts/train_qwen2_5_\w+\.sh"
# Which way a command is executed, by pattern.
KINDS = {
    "emulated": rf"{LAUNCHER} --emulate .*|\.venv/bin/python scripts/export_hf\.py .*",
    "looked at": r"python3 -m webbrowser \S+|bash scripts/watch\.sh \S+|\.venv/bin/tensorboard --logdir \S+",
    "on NPUs": rf"{LAUNCHER} --model .*",  # tests/scripts/test_one_node.py
    "planned": r"python scripts/plan\.py .*",
    "downloaded": r"(modelscope|hf) download .*",
    "verl's own command": r"python3 scripts/enable_patches\.py",  # tests/scripts/test_guides.py
    "checked": r"python scripts/doctor\.py .*",
    "in the image": r"docker (build|exec) .*|bash scripts/run_container\.sh .*",
}


def kind_of(command: str) -> str:
    (kind,) = [kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, command)]
    return kind


def commands_of(guide: Path) -> list[str]:
    return [line.strip() for line in commands(guide.read_text())]


def of_kind(*kinds: str) -> list[str]:
    return [command for command in commands_of(GUIDES[0]) if kind_of(command) in kinds]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_every_command_is_executed_in_some_way(guide):
    assert {kind_of(command) for command in commands_of(guide)} == set(KINDS)


@pytest.mark.parametrize(
    "added", ["bash scripts/new.sh --emulate", ".venv/bin/python scripts/report.py RUN", "bash scripts/watch.sh a b"]
)
def test_unexecuted_command_detected(added):
    """The control: such a command in the guide would fail the test above."""
    with pytest.raises(ValueError):
        [kind_of(command) for command in [*commands_of(GUIDES[0]), added]]


def test_the_commands_for_npus_are_those_that_the_launchers_tests_execute():
    from tests.scripts.test_one_node import commands_of_the_guide

    tested = [command for command in commands_of_the_guide() if "--emulate" not in command]
    assert [shlex.split(command) for command in of_kind("on NPUs")] == tested


def executed(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Execute the command with `folder` first on PATH; it must succeed."""
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    ended = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def tool(file: Path, text: str) -> None:
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize("command", of_kind("planned"))
def test_a_plan_of_the_guide_fits(command, tmp_path):
    for size, (values, _) in QWEN.items():
        (tmp_path / f"Qwen2.5-{size}-Instruct").mkdir()
        content = json.dumps(NAMED | dict(zip(NAMES, values, strict=True)))
        (tmp_path / f"Qwen2.5-{size}-Instruct" / "config.json").write_text(content)
    tool(tmp_path / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    assert "everything fits" in executed(command.replace("/data/", f"{tmp_path}/"), tmp_path).stdout


@pytest.mark.parametrize("command", of_kind("checked"))
def test_the_doctor_of_the_guide_knows_the_chip(command, tmp_path):
    """The dies are an emulated Atlas A2's; the file is a copy of the guide's, with the reader's model in it."""
    (name,) = set(re.findall(r"`(scripts/env/a2_\S+_64gb\.env)`", GUIDES[0].read_text()))
    (tmp_path / "a2.env").write_text((ROOT / name).read_text().replace("<folder of the model>", str(tmp_path)))
    words = shlex.split(command.replace("/data/", f"{tmp_path}/"))
    environment = os.environ | {"NPU_EMULATOR_CHIP": "Ascend910B3", "NPU_EMULATOR_DEVICES": "8"}
    ended = subprocess.run(
        [sys.executable, *words[1:], "--no-self-test"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    # This machine may lack some of a node's limits, which the guide cannot help.
    assert ended.returncode in (0, 1) and "error:" not in ended.stderr, ended.stderr
    assert re.search(r"^ok +chip +Atlas A2, emulated$", ended.stdout, re.MULTILINE), ended.stdout
    assert re.search(r"^ok +NPUs +8 emulated$", ended.stdout, re.MULTILINE)


def test_the_image_is_built_started_and_entered(tmp_path):
    """The stand-in docker records its arguments and has the Ascend runtime."""
    (tmp_path / "data").mkdir()
    tool(tmp_path / "docker", f"""[[ $1 != info ]] || echo '{{"ascend": 1}}'\necho "$@" >>{tmp_path}/calls""")
    for command in of_kind("in the image"):
        executed(command.replace("/data", f"{tmp_path}/data"), tmp_path)
    build, *_, start, enter = (tmp_path / "calls").read_text().splitlines()
    file = re.search(r"-f (\S+)", build)
    assert build.startswith("build -t IMAGE ") and file and (ROOT / file[1]).is_file()
    assert start.startswith("run ") and "--name NAME" in start and f"{tmp_path}/data:" in start and "IMAGE" in start
    assert enter.split()[0] == "exec" and "NAME" in enter.split()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """Return the folder that replaces outputs/: later commands read what earlier ones wrote."""
    return tmp_path_factory.mktemp("outputs")


@pytest.mark.exhaustive
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("command", of_kind("emulated", "looked at"))
def test_a_command_without_a_card_works(command, outputs, tmp_path):
    """It runs as written except for its folder, and with two steps by default (test_one_node.py trains twenty)."""
    words = [word.replace("outputs/", f"{outputs}/", 1) for word in shlex.split(command)]
    if "watch.sh" in command or "tensorboard" in command:
        assert served(words)
        return
    if "--emulate" in words:
        end = words.index("--") if "--" in words else len(words)
        words[end:end] = [] if "--steps" in words else ["--steps", "2"]
        words[3:3] = [] if "--output" in words else ["--output", str(tmp_path / "run")]
    tool(tmp_path / "browser", f'echo "$1" >{tmp_path}/opened')
    executed(shlex.join(words), tmp_path, BROWSER=f"{tmp_path}/browser %s")
    if "--emulate" in words:
        run = Path(words[words.index("--output") + 1])
        asked = int(words[words.index("--steps") + 1])
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps[-1] == asked and (run / "report.html").exists(), steps
    elif "webbrowser" in words:
        assert Path((tmp_path / "opened").read_text().strip()).is_file()
    else:
        assert list(Path(words[-1]).glob("*.safetensors"))


def served(words: list[str]) -> bytes:
    """Return the page at the address that a server prints, and end the server."""
    more = ["--port", "0"] if "tensorboard" in words[0] else []
    server = subprocess.Popen(
        [*words, *more], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        address = next(match[0] for line in server.stdout if (match := re.search(r"http://\S+:\d+/", line)))
        with urllib.request.urlopen(address, timeout=600) as answer:
            return answer.read()
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.communicate(timeout=600)
