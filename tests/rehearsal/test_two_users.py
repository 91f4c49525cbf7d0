"""Two users rehearse at once on one machine, each with separate Ray, folders, shared memory and dies."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from post_training.processes.descendants import descendants, runs, wait_until
from rehearsal.plan import Options, make_plan
from tests.second_user import User, second_user, shared_folder, this_user
from verl_patches.trainer.isolated_ray.folder import shared_memory_prefix

ROOT = Path(__file__).resolve().parents[2]
JOB = "qwen2_5_0_5b_gsm8k"
SECONDS_ALLOWED = 600
# Signals that it was called, and waits for a file, so that both trainings overlap and one outlives the other.
REWARD = """
import time
from pathlib import Path

from post_training.rewards import score

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    Path({reached!r}).touch()
    deadline = time.monotonic() + {seconds}
    while not Path({awaited!r}).exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the other run did not come so far")
        time.sleep(0.05)
    return float(solution_str.strip() == ground_truth)
"""


@dataclass(frozen=True)
class Run:
    """One user's rehearsal; the file `reached` appears once its training has answers to score."""

    user: User
    process: subprocess.Popen[bytes]
    output: Path
    reached: Path
    log: Path

    def ray(self) -> dict[str, int]:
        """Return the names and IDs of its Ray processes, and the port of its Ray head."""
        found = {}
        for number in descendants(self.process.pid):
            command = Path(f"/proc/{number}/cmdline").read_bytes().decode().split("\0")
            name = Path(command[0]).name
            if name in ("raylet", "gcs_server"):
                assert Path(f"/proc/{number}").stat().st_uid == self.user.uid
                found[name] = number
            if name == "gcs_server":
                found["port"] = int(re.search(r"--gcs_server_port=(\d+)", " ".join(command))[1])
        return found

    def folders(self) -> set[Path]:
        """Return its temporary folders and its emulated dies, without those of other runs."""
        names = set()
        for number in descendants(self.process.pid):
            variables = Path(f"/proc/{number}/environ").read_bytes().decode(errors="replace").split("\0")
            given = dict(each.split("=", 1) for each in variables if "=" in each)
            names |= {Path(given["TMPDIR"])} if "TMPDIR" in given else set()
            dies = given.get("NPU_EMULATOR_NODE", "none")
            names |= set(Path("/dev/shm").glob(f"npu_emulator-*-{self.user.uid}-{dies}"))
        return names

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


@pytest.fixture
def checkpoint() -> Path:
    """Return the tiny model made by the owner of the checkout."""
    plan = make_plan(Options(job=JOB), "time")
    if not plan.checkpoint.exists():
        subprocess.run(plan.checkpoint_command(), cwd=ROOT, check=True, capture_output=True)
    return plan.checkpoint


def start(user: User, awaited: Path) -> Run:
    """Start a rehearsal of two steps whose reward waits for `awaited`."""
    output, reached, reward = user.home / "run", user.home / "reached", user.home / "reward.py"
    reward.write_text(REWARD.format(reached=str(reached), awaited=str(awaited), seconds=SECONDS_ALLOWED))
    options = ["--job", JOB, "--dies", "2", "--steps", "2", "--output", str(output)]
    line = [sys.executable, "-m", "rehearsal", *options, "--", f"custom_reward_function.path={reward}"]
    log = user.home.parent / f"{user.home.name}.log"
    return Run(user, user.start(*line, cwd=ROOT, log=log), output, reached, log)


def stopped(run: Run) -> None:
    if run.process.poll() is None:
        run.process.terminate()
        run.process.wait(60)


def assert_ended_well(run: Run) -> None:
    assert run.process.wait(SECONDS_ALLOWED) == 0, run.said()
    summary = json.loads((run.output / "summary.json").read_text())
    assert (summary["steps"], summary["failure"]) == (2, None)
    assert summary["patches_effective"] == summary["patches_applied"] > 0
    assert (run.output / "summary.json").stat().st_uid == run.user.uid


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS_ALLOWED)
def test_two_users_rehearse_beside_each_other(shared, checkpoint):
    """While both train, nothing is shared; the run that ends first removes nothing of the other's."""
    first, second = this_user(shared / "first"), second_user(shared / "second")
    ended = shared / "ended"
    with ExitStack() as running:
        one = start(first, second.home / "reached")
        running.callback(stopped, one)
        other = start(second, ended)
        running.callback(stopped, other)
        wait_until(lambda: other.reached.exists() or other.process.poll() is not None, SECONDS_ALLOWED)
        assert one.reached.exists() or wait_until(one.reached.exists, SECONDS_ALLOWED), one.said()
        assert other.reached.exists(), other.said()
        rays, folders = [one.ray(), other.ray()], [one.folders(), other.folders()]
        assert_ended_well(one)
        assert other.process.poll() is None and other.ray() == rays[1] and other.folders() == folders[1]
        ended.touch()
        assert_ended_well(other)
    assert all(ray.keys() == {"raylet", "gcs_server", "port"} for ray in rays)
    assert set(rays[0].values()).isdisjoint(rays[1].values())
    assert len(folders[0]) >= 3 and len(folders[1]) >= 3 and folders[0].isdisjoint(folders[1])
    assert not any(runs(ray[name]) for ray in rays for name in ("raylet", "gcs_server"))
    assert not [folder for folder in folders[0] | folders[1] if folder.exists()]
    names = [shared_memory_prefix(folder) for folder in folders[0] | folders[1]]
    assert not [path for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(names))]
