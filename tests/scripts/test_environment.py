"""scripts/lib/environment.sh with stub commands on PATH: its calls, their order, and its rejections."""

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rehearsal.tiny_model.architecture import TINY_MODELS

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_COMMANDS = (
    "awk bash cat chmod cp cut date dirname du env find flock grep mkdir printf rm setsid sha256sum sleep sort tail tr"
    " uname xargs"
).split()
ENSURE = """
set -euo pipefail
source scripts/lib/terminal.sh
source scripts/lib/environment.sh
environment_ensure "$PWD" "$@"
"""
# Stands for python3.11: makes a ".venv" whose python and uv only record how they were called.
PYTHON_STUB = f"""#!/bin/bash
case "$*" in
    *interpreter.py*) exec {shlex.quote(sys.executable)} "$@" ;;
    *version_info*) echo 3.11 ;;
    *sys.version*) echo "3.11 stub" ;;
    *ensurepip*) exit 0 ;;
    *sysconfig*) echo /usr/include ;;
    "-m venv "*)
        echo "venv" >>"$CALLS"
        mkdir -p "$3/bin"
        cp "$TOOLS/called" "$3/bin/python"
        cp "$TOOLS/called" "$3/bin/uv"
        ;;
    *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""
CALLED_STUB = """#!/bin/bash
name=${0##*/}
case "$name $*" in
    "python -m pip"*) echo "pip" >>"$CALLS" ;;
    "python "*npu_emulator/build.py) echo "compile" >>"$CALLS"; name=compiler ;;
    "python "*compile_bytecode.py) echo "bytecode" >>"$CALLS" ;;
    "uv pip install"*--require-hashes*"--link-mode copy"*pytorch.lock) echo "pytorch" >>"$CALLS" ;;
    "python -I -S "*installed_files.py*) echo "check" >>"$CALLS"; [[ ! -e "$TOOLS/damaged" ]] || exit 2 ;;
    "uv pip install"*--require-hashes*"--link-mode copy"*tune.lock) echo "search" >>"$CALLS" ;;
    "uv pip install"*"--link-mode copy"*npu_emulator*) echo "emulator" >>"$CALLS" ;;
    "uv pip install"*--require-hashes*"--link-mode copy"*requirements/2026/*) echo "packages-2026" >>"$CALLS" ;;
    "uv pip install"*--require-hashes*"--link-mode copy"*) echo "packages" >>"$CALLS" ;;
    "python -m rehearsal.environment"*) echo "NPU_EMULATOR_CHIP=${*: -1}" ;;
    "python -m "*) echo "run:$NPU_EMULATOR_CHIP:${*:2}" | tr ' ' ',' >>"$CALLS" ;;
    *) echo "unexpected: $name $*" >&2; exit 9 ;;
esac
if [[ -e "$TOOLS/break-$name" ]]; then echo "stub broke" >&2; exit 1; fi
if [[ -e "$TOOLS/hang-$name" ]]; then sleep 600 & echo $! >"$TOOLS/hanging"; echo here >"$TOOLS/ready"; wait; fi
"""

INSTALLED = ["venv", "pip", "pytorch", "compile"]
SHARED = "--numprocesses=3,--dist=loadfile,--no-loadscope-reorder"
# One file of each kind from which the emulated NPU is built.
SOURCES = (
    "csrc/device.cpp",
    "csrc/node.h",
    "build.py",
    "documented_rules.txt",
    "src/npu_emulator.pth",
    "pyproject.toml",
)


class Machine:
    """A checkout in a temporary folder, and a PATH with only system commands and stubs."""

    def __init__(self, folder: Path, name: str = "check out") -> None:
        self.root, self.tools = folder / name, folder / "tools"
        self.calls = folder / "calls"
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        # A dry run needs only what plans a run.
        for name in ("rehearsal", "post_training"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        asked = self.root / "verl_patches/trainer/isolated_ray/interpreter.py"
        asked.parent.mkdir(parents=True)
        shutil.copy(ROOT / asked.relative_to(self.root), asked)
        for source in SOURCES:
            (self.root / "npu_emulator" / source).parent.mkdir(parents=True, exist_ok=True)
            (self.root / "npu_emulator" / source).write_text("first\n")
        self.tools.mkdir()
        for name in SYSTEM_COMMANDS:
            (self.tools / name).symlink_to(shutil.which(name))
        self.environment = {"PATH": str(self.tools), "CALLS": str(self.calls), "TOOLS": str(self.tools)}
        self.stub("python3.11", PYTHON_STUB)
        self.stub("called", CALLED_STUB)
        self.stub("c++", "#!/bin/bash\nexit 0\n")
        self.leave_space(10**6)

    def stub(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IEXEC)

    def leave_space(self, megabytes: int) -> None:
        """Make the disk seem to have so many megabytes left."""
        self.stub("df", f"#!/bin/bash\nprintf '%s\\n' Avail {megabytes}\n")

    def run(self, *command: str, stack: str = "2025") -> subprocess.CompletedProcess[str]:
        command = command or ("bash", "-c", ENSURE, "ensure", stack)
        return subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, timeout=600)

    def take_calls(self) -> list[str]:
        """Return what was called since the last time; of those that run together, the compiler first."""
        calls = self.calls.read_text().split() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        if "compile" in calls:
            calls.remove("compile")
            calls.insert(INSTALLED.index("compile"), "compile")
        return calls


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def rejected(done, *parts):
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr
    return True


def test_first_run_installs_in_order_and_the_second_does_nothing(machine):
    first = machine.run()
    assert first.returncode == 0, first.stderr
    assert machine.take_calls() == [*INSTALLED, "packages", "bytecode", "search", "emulator", "check"]
    second = machine.run()
    assert second.returncode == 0 and second.stdout == "" and machine.take_calls() == ["check"]


@pytest.mark.parametrize("name", ["it's", "a\\b", "it's here", "a\\b c", "克隆"])
def test_a_path_from_which_ray_starts_no_workers_rejected_before_anything_is_made(tmp_path, name):
    machine = Machine(tmp_path, name)
    done = machine.run()
    if name in ("it's", "a\\b"):
        assert rejected(done, f"{machine.root}/.venv", "path without quotes") and machine.take_calls() == []
    else:
        assert done.returncode == 0 and "packages" in machine.take_calls()


@pytest.mark.parametrize("stack", ["2025", "2026"])
def test_pytorch_is_installed_first_with_its_hashes(machine, stack):
    assert machine.run(stack=stack).returncode == 0
    folder = machine.root / "requirements" / ("" if stack == "2025" else stack)
    locks = "".join((folder / f"{name}.lock").read_text() for name in ("runtime", "upstream"))
    chosen = (machine.root / (".venv" if stack == "2025" else f".venv-{stack}") / "pytorch.lock").read_text()
    entries = {name: text for text, name in re.findall(r"^((\S+)==.*\n(?: .*\n)+)", locks, re.MULTILINE)}
    for name in ("torch", "torch-npu", "numpy", "sympy", "nvidia-cublas-cu12"):
        assert "--hash=sha256:" in entries[name] and entries[name] in chosen
    assert re.findall(r"^vllm|^ray|^transformers", chosen, re.MULTILINE) == []


def test_stacks_have_environments_of_their_own(machine):
    """They have separate folders, locks, logs and stamps: each is set up once, whatever happens to the other."""
    machine.run()
    machine.take_calls()
    first = machine.run(stack="2026")
    assert first.returncode == 0, first.stderr
    assert machine.take_calls() == [*INSTALLED, "packages-2026", "bytecode", "emulator", "check"]
    assert f"Setting up the environment in {machine.root}/.venv-2026\n" in first.stdout
    for stack in ("2025", "2026"):
        assert machine.run(stack=stack).returncode == 0 and machine.take_calls() == ["check"]
    assert {path.name for path in (machine.root / ".cache").iterdir()} == {
        f"setup{suffix}.{end}" for suffix in ("", "-2026") for end in ("lock", "log")
    }
    (machine.root / "requirements" / "2026" / "dev.lock").write_text("other\n")
    assert machine.run().returncode == 0 and machine.take_calls() == ["check"]
    assert machine.run(stack="2026").returncode == 0 and "packages-2026" in machine.take_calls()


@pytest.mark.parametrize("stack", ["2025", "2026"])
def test_set_up_says_what_it_takes_before_it_starts(machine, stack):
    (machine.tools / "break-python").touch()
    said = machine.run(stack=stack).stdout.splitlines()
    taken = re.fullmatch(r"It takes (\d\.\d) GB there, as much in the installer's cache, and (\d) minutes .*", said[1])
    assert taken and 5 < float(taken[1]) < 12 and said[2].startswith("  creating .venv")


@pytest.mark.parametrize("stack", ["2025", "2026"])
def test_full_disk_stops_before_anything_is_made(machine, stack):
    machine.leave_space(1234)
    folder = machine.root / (".venv" if stack == "2025" else ".venv-2026")
    done = machine.run(stack=stack)
    assert rejected(done, f"{folder} needs 9.", " GB, but its disk has 1.2 GB left. Free space")
    assert not folder.exists() and machine.take_calls() == []


def test_space_of_replaced_packages_counts(machine):
    assert machine.run().returncode == 0
    (machine.root / "requirements" / "runtime.lock").write_text("other\n")
    machine.leave_space(1234)
    (machine.tools / "du").unlink()
    machine.stub("du", "#!/bin/bash\nprintf '9000\\t.venv\\n'\n")
    assert machine.run().returncode == 0


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ([], f"run:a2:pytest,{SHARED},tests/stack_2026,tests/overlay/test_pins.py"),
        (["--fast"], f"run:a2:pytest,{SHARED},tests/stack_2026,tests/overlay/test_pins.py,--fast"),
        (["-k", "scripts"], "run:a2:pytest,tests/stack_2026,tests/overlay/test_pins.py,-k,scripts"),
        (["-k", "chip"], "run:a2:pytest,tests/stack_2026,tests/overlay/test_pins.py,-k,chip"),
        (["--chip", "a3", "tests/one.py::f"], "run:a3:pytest,tests/one.py::f"),
    ],
)
def test_tests_of_a_stack_run_in_its_environment_alone(machine, arguments, run):
    shutil.copytree(ROOT / "post_training", machine.root / "post_training", dirs_exist_ok=True)
    (machine.root / "tests" / "stack_2026").mkdir(parents=True)
    (machine.root / "tests" / "one.py").touch()
    (machine.root / "tests" / "stack_2026" / "also.txt").write_text("# a comment\ntests/overlay/test_pins.py\n")
    done = machine.run("bash", "scripts/test.sh", "--stack", "2026", *arguments)
    assert done.returncode == 0, done.stderr
    assert machine.take_calls()[-2:] == ["check", run] and not (machine.root / ".venv").exists()


def test_listed_tests_of_a_stack_exist():
    lines = (ROOT / "tests" / "stack_2026" / "also.txt").read_text().splitlines()
    listed = [line for line in lines if not line.startswith("#")]
    assert listed and all((ROOT / each).exists() for each in listed)


def test_rehearsal_of_a_stack_starts_its_own_program(machine):
    done = machine.run("bash", "scripts/rehearse.sh", "--stack", "2026", "--steps", "3", "--", "a=b")
    assert done.returncode == 0, done.stderr
    assert machine.take_calls()[-2:] == ["check", "run::rehearsal.stack_2026,--steps,3,--,a=b"]


@pytest.mark.parametrize("script", ["rehearse.sh", "test.sh"])
def test_unknown_stack_rejected_by_name(machine, script):
    assert rejected(
        machine.run("bash", f"scripts/{script}", "--stack", "2024"), "--stack=2024 is invalid", "2025 or 2026"
    )
    assert rejected(machine.run("bash", f"scripts/{script}", "--stack"), "--stack needs a value")
    assert machine.take_calls() == []


def test_options_of_the_other_stack_rejected(machine):
    assert rejected(machine.run("bash", "scripts/test.sh", "--stack", "2026", "--measure"), "--measure is for", "2025")
    assert rejected(machine.run("bash", "scripts/test.sh", "--chip", "a2"), "--chip needs --stack 2026")
    assert machine.take_calls() == []


def test_damaged_files_stop_a_run_whose_environment_is_ready(machine):
    machine.run()
    (machine.tools / "damaged").touch()
    assert machine.run().returncode == 2
    (machine.tools / "damaged").unlink()
    assert machine.run().returncode == 0


@pytest.mark.parametrize("source", SOURCES)
def test_changed_emulator_alone_is_rebuilt_alone(machine, source):
    machine.run()
    machine.take_calls()
    (machine.root / "npu_emulator" / source).write_text("second\n")
    assert machine.run().returncode == 0
    assert machine.take_calls() == ["emulator", "check"]


def test_another_search_is_installed_beside_existing_ones(machine):
    machine.run()
    machine.take_calls()
    (machine.root / "requirements" / "tune.lock").write_text("other\n")
    assert machine.run().returncode == 0
    assert machine.take_calls() == ["search", "check"]


def test_changed_lock_starts_from_nothing(machine):
    machine.run()
    machine.take_calls()
    (machine.root / ".venv" / "leftover").touch()
    (machine.root / "requirements" / "runtime.lock").write_text("other\n")
    assert machine.run().returncode == 0
    assert machine.take_calls() == [*INSTALLED, "packages", "bytecode", "search", "emulator", "check"]
    assert not (machine.root / ".venv" / "leftover").exists()


@pytest.mark.parametrize(
    ("broken", "repeated"),
    [
        ("python", ["venv", "pip"]),
        ("uv", ["venv", "pip", "pytorch"]),
        ("compiler", [*INSTALLED, "packages", "bytecode"]),
    ],
)
def test_failed_setup_says_where_and_is_never_taken_as_complete(machine, broken, repeated):
    (machine.tools / f"break-{broken}").touch()
    for _ in range(2):
        done = machine.run()
        assert done.returncode == 2
        assert "stub broke" in done.stderr and "setup.log" in done.stderr
        assert machine.take_calls() == repeated
    (machine.tools / f"break-{broken}").unlink()
    assert machine.run().returncode == 0
    assert machine.take_calls() == [*INSTALLED, "packages", "bytecode", "search", "emulator", "check"]


@pytest.mark.parametrize(
    ("number", "stack", "hanging"),
    [
        (signal.SIGINT, "2025", "uv"),
        (signal.SIGTERM, "2025", "compiler"),
        (signal.SIGQUIT, "2025", "uv"),
        (signal.SIGINT, "2026", "compiler"),
    ],
)
def test_interrupted_setup_leaves_no_process_and_is_done_again(machine, number, stack, hanging):
    (machine.tools / f"hang-{hanging}").touch()
    os.mkfifo(machine.tools / "ready")
    running = subprocess.Popen(
        ["bash", "-c", ENSURE, "ensure", stack],
        cwd=machine.root,
        env=machine.environment,
        stderr=subprocess.PIPE,
        text=True,
        # A shell cannot trap signals that were ignored at its start, as these are below some test harnesses.
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGQUIT)],
    )
    wait_until_ready(running, machine.tools / "ready")
    sleeper = int((machine.tools / "hanging").read_text())
    assert Path(f"/proc/{sleeper}").exists()
    running.send_signal(number)
    _, errors = running.communicate(timeout=600)
    assert running.returncode == 128 + number and "was interrupted" in errors
    wait_until_gone(sleeper)
    (machine.tools / f"hang-{hanging}").unlink()
    machine.take_calls()
    assert machine.run(stack=stack).returncode == 0
    packages = ["packages", "bytecode", "search"] if stack == "2025" else ["packages-2026", "bytecode"]
    assert machine.take_calls() == [*INSTALLED, *packages, "emulator", "check"]


def wait_until_ready(running, pipe):
    """Wait for a word in the named pipe; a command that ends without one fails the test at once."""
    ready, ended = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(running.pid)
    try:
        readable, _, _ = select.select([ready, ended], [], [], 600)
        assert ready in readable, f"exit code {running.poll()}: {running.stderr.read()}"
    finally:
        os.close(ready)
        os.close(ended)


def wait_until_gone(process):
    deadline = time.monotonic() + 30
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{process}/stat").read_text().split()[2] != "Z":
            assert time.monotonic() < deadline, "a process of the set-up was left running"


def test_setup_that_runs_elsewhere_is_waited_for(machine):
    (machine.root / ".cache").mkdir()
    hold = ["flock", machine.root / ".cache" / "setup.lock", "bash", "-c", "echo held; cat"]
    holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        waiting = subprocess.Popen(
            ["bash", "-c", ENSURE], cwd=machine.root, env=machine.environment, stdout=subprocess.PIPE, text=True
        )
        assert "waiting for it" in waiting.stdout.readline()
        assert machine.take_calls() == []
        holder.communicate()
        waiting.communicate(timeout=600)
        assert waiting.returncode == 0 and machine.take_calls()[-2:] == ["emulator", "check"]
    finally:
        holder.kill()


def as_another_user(machine):
    """Run environment_ensure with an unwritable checkout; root gives up its right to write anywhere for that."""
    for folder in (machine.root, machine.root / ".cache", machine.root / ".venv", machine.root / ".venv" / "stamps"):
        folder.chmod(0o555)
    (machine.root / ".cache" / "setup.lock").chmod(0o444)
    less = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.getuid() == 0 else []
    command = [*less, "bash", "-c", ENSURE]
    machine.environment["PATH"] += ":/usr/bin:/bin"  # for stat, id and setpriv
    return subprocess.run(command, cwd=machine.root, env=machine.environment, capture_output=True, text=True)


def test_python_keeps_bytecode_whatever_an_image_says(machine):
    machine.environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = machine.run("bash", "-c", f"{ENSURE}\necho ${{PYTHONDONTWRITEBYTECODE-unset}}")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "unset", done.stderr


def test_ready_environment_of_another_user_is_used(machine):
    assert machine.run().returncode == 0
    machine.take_calls()
    done = as_another_user(machine)
    assert (done.returncode, done.stderr) == (0, "") and machine.take_calls() == ["check"]


def test_unready_environment_of_another_user_is_named(machine):
    assert machine.run().returncode == 0
    machine.take_calls()
    (machine.root / ".venv" / "stamps" / "emulator").write_text("another\n")
    done = as_another_user(machine)
    assert done.returncode == 2 and machine.take_calls() == []
    assert "has to be set up, but" in done.stderr and "Let its owner run scripts/test.sh" in done.stderr


def test_no_python(machine):
    (machine.tools / "python3.11").unlink()
    assert rejected(machine.run(), "Python 3.11 is needed", "no Python was found")
    assert machine.take_calls() == []


def test_wrong_python(machine):
    (machine.tools / "python3.11").unlink()
    machine.stub("python3", "#!/bin/bash\necho 3.12\n")
    assert rejected(machine.run(), "Python 3.11 is needed (python3 is 3.12)", "install python3.11")


def test_python_3_11_under_another_name_is_found(machine):
    (machine.tools / "python3.11").rename(machine.tools / "python3")
    assert machine.run().returncode == 0


def test_another_kind_of_machine(machine):
    (machine.tools / "uname").unlink()
    machine.stub("uname", "#!/bin/bash\necho aarch64\n")
    assert rejected(machine.run(), "This machine is aarch64", "for Linux on x86_64")
    assert machine.take_calls() == []


def test_no_compiler(machine):
    (machine.tools / "c++").unlink()
    assert rejected(machine.run(), "No C++ compiler: c++ was not found", "apt-get install g++")
    assert machine.take_calls() == []


def test_compiler_that_cannot_compile(machine):
    machine.stub("c++", "#!/bin/bash\nexit 1\n")
    assert rejected(machine.run(), "The C++ compiler c++ cannot compile C++17")


def test_launcher_rejects_before_it_sets_up_anything(machine):
    (machine.tools / "c++").unlink()
    launcher = ("bash", "scripts/rehearse.sh")
    assert rejected(machine.run(*launcher), "No C++ compiler")
    assert rejected(
        machine.run(*launcher, "--data", "absent.json"), "--data=absent.json is invalid: the file does not exist"
    )
    assert rejected(machine.run(*launcher, "--data", "scripts"), "is invalid: not a readable file")
    assert rejected(machine.run(*launcher, "--data"), "--data needs a value")
    assert rejected(
        machine.run(*launcher, "--steps", "0"), "--steps=0 is invalid. Set it to a whole number, at least 1"
    )
    assert rejected(machine.run(*launcher, "--dies", "four"), "--dies=four is invalid")
    assert rejected(machine.run(*launcher, "--seed", "-1"), "--seed=-1 is invalid. Set it to a whole number")
    assert rejected(machine.run(*launcher, "--model", "llama"), f"Set it to one of: {' '.join(sorted(TINY_MODELS))}.")
    assert rejected(machine.run(*launcher, "--faster"), 'Unknown argument "--faster"')
    (machine.root / "verl_plugin" / "config").mkdir(parents=True)
    (machine.root / "verl_plugin" / "config" / "qwen3_0_6b_gsm8k_one_card.yaml").touch()
    options = {
        "--backend": "fsdp2", "--weights": "naive", "--precision": "bfloat16", "--tool": "calculator",
        "--rollout-dies": "1", "--job": "qwen3_0_6b_gsm8k_one_card",
    }  # fmt: skip
    for option, good in options.items():
        bad = machine.run(*launcher, "--stack", "2026", option, "none")
        assert rejected(bad, f"{option}=none is invalid. Set it to ")
        assert rejected(machine.run(*launcher, option, good), f"{option} needs --stack 2026")
        assert rejected(machine.run(*launcher, "--stack", "2026", option, good), "No C++ compiler")
    assert not (machine.root / ".venv").exists() and machine.take_calls() == []


def test_dry_run_needs_no_environment_and_makes_nothing(machine):
    # -S: no installed package is visible
    machine.stub("python3.11", f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    before = sorted(path.name for path in machine.root.iterdir())
    done = machine.run("bash", "scripts/rehearse.sh", "--dry-run", "--steps", "3", "--", "a.b=c d")
    assert done.returncode == 0, done.stderr
    assert f"{machine.root}/.venv/bin/python" in done.stdout
    assert done.stdout.rstrip().endswith("trainer.total_training_steps=3 'a.b=c d'")
    assert sorted(path.name for path in machine.root.iterdir()) == before and machine.take_calls() == []
