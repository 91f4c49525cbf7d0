"""A forked worker acts like an ordinary process, with its own streams, environment, directory and exit code."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rehearsal.prefork import PreforkError, launch, start_template

REPORT = """
import json, os, sys
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv[1:], "directory": os.getcwd(),
    "marker": os.environ.get("MARKER"), "leaked": os.environ.get("PARENT_ONLY"), "main": __name__,
    "preloaded": sorted(m for m in ("colorsys", "wave") if m in sys.modules),
}))
print("to standard error", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture
def template(monkeypatch):
    monkeypatch.setenv("PARENT_ONLY", "1")
    running = start_template(["colorsys"])
    yield running
    if running.process.poll() is None:
        running.close()


def start_worker(template, script: Path, *arguments: str, **options) -> subprocess.Popen:
    command = [*shlex.split(template.py_executable), str(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def write(folder: Path, source: str) -> Path:
    script = folder / "worker.py"
    script.write_text(source)
    return script


@pytest.mark.parametrize(("program", "ended_by"), [("", 0), ("import time; time.sleep(600)", -signal.SIGKILL)])
def test_a_template_that_does_not_end_when_it_is_closed_is_killed(tmp_path, program, ended_by):
    (tmp_path / "prefork").mkdir()
    (tmp_path / "prefork" / "template.sock").touch()
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", program])
    watched, control = os.pipe()
    made = launch.Template(process, tmp_path / "prefork" / "template.sock", control)
    made.close(timeout_s=0.001 if program else 60)
    assert process.returncode == ended_by and not (tmp_path / "prefork").exists()
    assert os.read(watched, 1) == b"", "the other end is closed"
    os.close(watched)


def test_worker_takes_over_the_clients_identity(template, tmp_path):
    environment = {"MARKER": "mine", "PATH": os.environ["PATH"]}
    worker = start_worker(template, write(tmp_path, REPORT), "a", "b c", cwd=tmp_path, env=environment)
    output, errors = worker.communicate(timeout=600)
    report = json.loads(output)
    assert report["parent"] == template.process.pid
    assert report["pid"] != worker.pid
    assert report["arguments"] == ["a", "b c"]
    assert report["directory"] == str(tmp_path)
    assert report["marker"] == "mine"
    assert report["leaked"] is None
    assert report["main"] == "__main__"
    assert report["preloaded"] == ["colorsys"], "only the modules asked for are imported beforehand"
    assert "to standard error" in errors
    assert worker.returncode == 7


def test_modules_are_imported_once_and_without_arguments(tmp_path, monkeypatch):
    (tmp_path / "counted_module.py").write_text(
        f"import sys; open({str(tmp_path / 'imports')!r}, 'a').write(str(sys.argv[1:]))"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    running = start_template(["counted_module"])
    script = write(tmp_path, "import counted_module")
    workers = [start_worker(running, script) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    running.close()
    assert (tmp_path / "imports").read_text() == "[]"


def test_what_imports_put_into_the_environment_stays_unless_the_client_says_otherwise(tmp_path, monkeypatch):
    (tmp_path / "announces.py").write_text("import os; os.environ |= {'HOME_OF_A_TOOLKIT': 'found', 'MARKER': 'x'}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    running = start_template(["announces"])
    script = write(tmp_path, "import os; print([os.environ.get(name) for name in ('HOME_OF_A_TOOLKIT', 'MARKER')])")
    worker = start_worker(running, script, env={"MARKER": "mine", "PATH": os.environ["PATH"]})
    assert worker.communicate(timeout=600)[0] == "['found', 'mine']\n"
    running.close()


def test_ray_variables_of_the_first_request_are_seen_by_imports(tmp_path, monkeypatch):
    (tmp_path / "reads_job.py").write_text("import os; JOB = os.environ.get('RAY_JOB_ID')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    running = start_template(["reads_job"])
    script = write(tmp_path, "import reads_job; print(reads_job.JOB)")
    worker = start_worker(running, script, env={**os.environ, "RAY_JOB_ID": "0100"})
    assert worker.communicate(timeout=600)[0].strip() == "0100"
    running.close()


def test_a_crashing_worker_reports_its_signal_and_spares_the_template(template, tmp_path):
    script = write(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert start_worker(template, script).wait(60) == 128 + signal.SIGKILL
    assert template.process.poll() is None
    worker = start_worker(template, write(tmp_path, "raise SystemExit('sentence')"))
    assert worker.communicate(timeout=60)[1] == "sentence\n" and worker.returncode == 1


def test_worker_and_client_that_end_together_spare_the_template(template, tmp_path):
    source = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    client = start_worker(template, write(tmp_path, source))
    worker = int(client.stdout.readline())
    template.process.send_signal(signal.SIGSTOP)
    for process in (worker, client.pid):
        os.kill(process, signal.SIGKILL)
    client.wait(60)
    template.process.send_signal(signal.SIGCONT)
    assert start_worker(template, write(tmp_path, "")).wait(60) == 0


@pytest.mark.parametrize("flags", [["-B", "-Wignore"], ["-X", "utf8", "-W", "ignore"], []])
def test_flags_of_the_interpreter_are_not_the_script(template, tmp_path, flags):
    (tmp_path / "ab").write_text("import sys; print(sys.argv)")
    command = [*shlex.split(template.py_executable), *flags, "ab", "-c"]
    assert subprocess.check_output(command, cwd=tmp_path, text=True, timeout=60) == "['ab', '-c']\n"


def test_output_of_imports_appears_once(tmp_path, monkeypatch):
    (tmp_path / "announces.py").write_text("print('imported')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with (tmp_path / "said").open("wb") as said:
        running = start_template(["announces"], said)
    script = write(tmp_path, "print('worked')")
    workers = [start_worker(running, script) for _ in range(2)]
    assert [worker.communicate(timeout=600)[0] for worker in workers] == ["worked\n"] * 2
    running.close()
    assert (tmp_path / "said").read_text() == "imported\n"


def test_client_of_a_template_that_has_ended_says_so(template, tmp_path):
    script = write(tmp_path, "")
    template.process.kill()
    template.process.wait()
    worker = start_worker(template, script)
    said = worker.communicate(timeout=60)[1]
    assert worker.returncode == 1 and said.startswith("error: the process that forks workers has ended ("), said
    assert said.count("\n") == 1


def test_program_runs_with_the_streams_and_signals_of_its_starter(template, capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ends = "import os, signal; os.kill({process}, signal.SIGTERM); signal.pause()"
    assert template.run("import sys; print(sys.argv[1]); sys.exit(5)", ["given"]) == 5
    assert capfd.readouterr().out == "given\n"
    assert template.run(ends.format(process=os.getpid()), []) == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_stopping_the_client_stops_its_worker(template, tmp_path):
    source = "import signal; print('ready', flush=True); signal.pause()"
    worker = start_worker(template, write(tmp_path, "import os; print(os.getpid(), flush=True)\n" + source))
    pid = int(worker.stdout.readline())
    assert worker.stdout.readline() == "ready\n"
    descriptor = os.pidfd_open(pid)
    worker.kill()
    assert worker.stdout.read() == "", "the pipe closes when the worker, its last holder, has ended"
    os.close(descriptor)
    worker.wait(60)


def test_worker_that_ignores_signals_ends_with_the_template(template, tmp_path):
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    worker = start_worker(template, write(tmp_path, source))
    assert worker.stdout.readline() == "ready\n"
    template.close()
    assert worker.stdout.read() == "", "the pipe closes when the worker, its last holder, has ended"
    assert template.process.returncode == 0
    worker.wait(60)


def test_close_ends_the_template_and_removes_its_socket(template):
    template.close()
    assert template.process.returncode == 0
    assert not template.socket_path.parent.exists()


def test_rejected_where_a_real_npu_driver_is(monkeypatch, tmp_path):
    device = tmp_path / "davinci_manager"
    device.touch()
    monkeypatch.setattr(launch, "NPU_DRIVER", device)
    with pytest.raises(PreforkError, match=r"verl_patches.trainer.main_ppo"):
        start_template(["colorsys"])


@pytest.mark.slow
def test_ray_workers_are_children_of_the_template():
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # pytest's temporary folders make Ray's socket paths too long
    source = f"""
import os, ray, sys
from rehearsal.prefork import start_template
template = start_template(["colorsys", "ray"])
ray.init(num_cpus=1, include_dashboard=False, _temp_dir={str(folder)!r},
         runtime_env={{"py_executable": template.py_executable, "env_vars": {{"MARKER": "mine"}}}})
@ray.remote(num_cpus=0.4)
class Actor:
    def describe(self):
        return os.getppid(), os.environ["MARKER"], "colorsys" in sys.modules
    def crash(self):
        os._exit(3)
actors = [Actor.remote() for _ in range(2)]
assert ray.get([a.describe.remote() for a in actors]) == [(template.process.pid, "mine", True)] * 2
try:
    ray.get(actors[0].crash.remote())
except ray.exceptions.RayActorError:
    print("crash seen")
ray.shutdown()
template.close()
print("closed", template.process.returncode)
"""
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600)
    shutil.rmtree(folder)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "crash seen" in run.stdout and "closed 0" in run.stdout
