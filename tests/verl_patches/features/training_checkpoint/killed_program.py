"""Trainings on two ranks that are killed at exact points and resumed: `python -m ...killed_program FOLDER`.

No Ray and no rollout: the ranks of `fsdp_program` train three steps and save each, and rank 0 publishes the steps as
verl's driver does. One process imports everything and forks the ranks of all runs; it reads the points from
``points.json`` and writes the results to ``found.json``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from post_training.hang_detection.signs import process_signs
from post_training.ports import reserve_ports
from rehearsal.resume_proof import stops
from rehearsal.resume_proof.comparison import compare
from rehearsal.resume_proof.stops import REACHED_NAME, STOP_NAME, Stop
from tests.ranks import run_one
from tests.verl_patches.features.training_checkpoint.fsdp_program import Trained, start_rank
from verl_patches.features import settings
from verl_patches.features.measure.feature import MeasureSettings
from verl_patches.features.training_checkpoint.feature import CheckpointSettings
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import begin_step, newest_step, step_folder
from verl_patches.features.training_checkpoint.trainer import process_publisher

RANKS, STEPS = 2, 3
_COMES_WITHIN_S = 300.0


def train(folder: Path, dtype: str) -> None:
    """Train on this rank in `folder`, from the newest checkpoint on."""
    stops.install()
    settings.activate(settings.OverlaySettings(measure=MeasureSettings(output_dir=str(folder))))
    start_rank()
    rank, root = dist.get_rank(), folder / "checkpoints"
    root.mkdir(exist_ok=True)
    trained = Trained(folder.parent, dtype)
    last = newest_step(root)[0] or 0
    publisher = process_publisher()
    if last:
        trained.load(step_folder(root, last) / "actor", last)
    if rank == 0:
        take_back_steps(str(folder), last)
    publisher.previous = last
    for step in range(last + 1, STEPS + 1):
        with process_signs().phase("update"):
            loss = trained.step(step)
        partial = root / f"global_step_{step}.partial"
        if rank == 0:
            begin_step(root, step)
            publisher.hold(root, step, lambda: {"step": step}, CheckpointSettings())  # noqa: B023  called in this pass
        dist.barrier()
        trained.save(partial / "actor")
        if rank == 0:
            with (folder / "metrics.jsonl").open("a") as records:
                records.write(json.dumps({"step": step, "time": 0.0, "metrics": {"loss": loss}}) + "\n")
            publisher.logged(step, {})
        dist.barrier()  # verl's driver requests the next update only after publishing the step
    dist.destroy_process_group()


def run(folder: Path, dtype: str, stop: Stop | None = None) -> None:
    """Run all ranks to their end; or kill the rank that reaches `stop` there, and then the others."""
    folder.mkdir(exist_ok=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_ports()), "WORLD_SIZE": str(RANKS)}
    if stop is not None:
        stop.write(folder)
    children = [start(folder, dtype, rank) for rank in range(RANKS)]
    if stop is not None:
        try:
            os.kill(wait_for(folder / REACHED_NAME, children), signal.SIGKILL)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        (folder / STOP_NAME).unlink()
        (folder / REACHED_NAME).unlink()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert stop is not None or not any(statuses), f"the ranks in {folder} ended with {statuses}"


def start(folder: Path, dtype: str, rank: int) -> int:
    """Fork one rank, and return its process id."""
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os._exit(run_one(lambda place: train(place, dtype), folder, rank))
    return child


def wait_for(reached: Path, children: list[int]) -> int:
    """Return the process id of the rank that has reached its stop; raise AssertionError if none does."""
    until = time.monotonic() + _COMES_WITHIN_S
    while not reached.is_file():
        assert time.monotonic() < until, f"no rank of {children} came to {reached.with_name(STOP_NAME).read_text()}"
        time.sleep(0.02)
    return json.loads(reached.read_text())["pid"]


def main(folder: Path) -> int:
    """Run to each point, resume, and compare with the unbroken run of the same precision."""
    found = []
    for number, (dtype, place, step, rank, write) in enumerate(json.loads((folder / "points.json").read_text())):
        unbroken = folder / f"unbroken_{dtype}"
        if not unbroken.exists():
            run(unbroken, dtype)
        killed = folder / f"killed_{number}"
        run(killed, dtype, Stop(place, step, rank, write))
        after = newest_step(killed / "checkpoints")[0] or 0
        run(killed, dtype)
        result = compare(unbroken, killed, STEPS)
        found.append({"after": after, "steps": result.steps, "differing": result.differing})
    (folder / "found.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
