"""Dies claimed by a job: a second job that wants one is told who holds it and which are free."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from post_training.claimed_dies import DiesInUse, claimed_dies, devices_of_dies
from tests.second_user import User, second_user, shared_folder, this_user

ROOT = Path(__file__).resolve().parents[2]
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
HOLD = """
import signal, sys
from pathlib import Path
from post_training.claimed_dies import claimed_dies
with claimed_dies(2, {}, Path(sys.argv[1])) as dies:
    print(*dies, flush=True)
    signal.pause()
"""


@pytest.fixture
def machine() -> Iterator[Path]:
    """Root of a file system with twelve dies, and similarly named files that are not dies."""
    with shared_folder() as root:
        (root / "dev").mkdir()
        for name in (*(f"davinci{number}" for number in range(12)), "davinci_manager", "davinci1x"):
            (root / "dev" / name).touch()
        yield root


def rejection(machine: Path, count: int, **environment: str) -> str:
    with pytest.raises(DiesInUse) as caught, claimed_dies(count, environment, machine):
        pass
    return str(caught.value)


def test_dies_are_in_the_order_of_cann(machine):
    assert [path.name for path in devices_of_dies(machine)] == [f"davinci{number}" for number in range(12)]


def test_overlapping_dies_rejected_with_those_that_are_free(machine):
    with claimed_dies(4, {VISIBLE: "2,3,4,11"}, machine) as first:
        assert first == [2, 3, 4, 11]
        holder = f"process {os.getpid()} of {getpass.getuser()} has die"
        assert rejection(machine, 4) == (
            f"{VISIBLE} (not set: dies 0 to 3) is invalid: {holder} 2 ({machine}/dev/davinci2). "
            "Set it to 0,1,5,6, which are free, or wait until that job has ended."
        )
        said = rejection(machine, 9, **{VISIBLE: "0,1,5,6,7,8,9,10,11"})
        assert said.endswith(f"{holder} 11 ({machine}/dev/davinci11). Wait until that job has ended.")


def test_dies_given_apart_are_held_beside_each_other(machine):
    """The dies of a rejected job and of a finished one are released, too."""
    with claimed_dies(2, {}, machine), claimed_dies(2, {VISIBLE: "2,3"}, machine):
        rejection(machine, 2, **{VISIBLE: "4,3"})
        with claimed_dies(2, {VISIBLE: "4,5"}, machine):
            pass
    with claimed_dies(12, {}, machine) as every:
        assert every == list(range(12))


def test_container_with_dies_of_its_own_is_not_rejected(machine):
    """CANN numbers each container's dies from 0; their device files keep the host's numbers."""
    with claimed_dies(2, {VISIBLE: "0,1"}, machine):
        for number in range(4):
            (machine / "dev" / f"davinci{number}").unlink()
        with claimed_dies(2, {VISIBLE: "0,1"}, machine) as dies:
            assert dies == [0, 1]


def test_job_takes_the_first_of_the_visible_dies(machine):
    with claimed_dies(2, {VISIBLE: "7,6,5,4"}, machine) as first, claimed_dies(0, {VISIBLE: "7"}, machine) as none:
        assert (first, none) == ([7, 6], [])


def test_machine_without_npus_claims_nothing(tmp_path):
    with claimed_dies(8, {}, tmp_path) as first, claimed_dies(8, {}, tmp_path) as second:
        assert first == second == []


@pytest.fixture(params=["this user", "another user"])
def user(request, tmp_path) -> User:
    make = this_user if request.param == "this user" else second_user
    return make(tmp_path / "home")


def test_killed_job_of_another_user_holds_no_die(user, machine, tmp_path):
    """The kernel tracks who holds a die, and releases it when that process is killed."""
    log = tmp_path / "said"
    holding = user.start(sys.executable, "-c", HOLD, str(machine), cwd=ROOT, log=log)
    try:
        while not log.read_text():
            assert holding.poll() is None
        said = rejection(machine, 1, **{VISIBLE: "1"})
        assert f"process {holding.pid} of {user.name} has die 1" in said
    finally:
        holding.send_signal(signal.SIGKILL)
        holding.wait()
    with claimed_dies(1, {VISIBLE: "1"}, machine) as dies:
        assert dies == [1]


def test_children_of_a_job_do_not_keep_its_dies(machine):
    with claimed_dies(1, {}, machine):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with claimed_dies(1, {}, machine) as dies:
        assert dies == [0]
    child.kill()
    child.wait()
