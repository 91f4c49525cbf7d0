"""A training that runs steps and fails as scripted; it writes the files and checkpoints that a run writes.

Usage: failing_training.py SCRIPT STEPS KEY=VALUE...; SCRIPT is a file with one {"after": step, "how": name} per start;
with "after": null it ends before it has resolved its configuration or written anything.
It resumes from the newest checkpoint and saves after every second step. A step's metrics depend on the step, so
a resumed run has the metrics of an unbroken one.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from post_training.checkpoint.durable import hash_file
from post_training.checkpoint.manifest import Manifest
from post_training.checkpoint.step_files import ACTOR
from post_training.start_status import report_status
from verl_patches.features.measure.run_files import RunFiles
from verl_patches.features.training_checkpoint.step_folders import begin_step, complete_step, newest_step, publish_step

TASK = "ray::WorkerDict.actor_rollout_update_actor() (pid=7, ip=127.0.0.1)"
MEMORY = "RuntimeError: NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)"
DIED = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
# ENDINGS: the output, the final sentence and the exit status. REASONS: the reason, if the training itself knows it.
KNOWN = ("OOM", "ray_died", "full_disk", "reward_error", "not_valid", "bad_configuration", "in_use")
REASONS = {"nonfinite_weights": "not_valid", **dict(zip(KNOWN, KNOWN, strict=True))}
ENDINGS = {
    "OOM": (f"{TASK}\n{MEMORY}", "a die ran out of device memory. Give the dies more memory", 1),
    "worker_died": (DIED, "due to SIGSEGV or another unexpected error.", 1),
    "ray_died": (DIED, "Ray ended during the run: its process raylet has gone", 1),
    "network_error": ("EI0006: Getting socket times out", "HCCL function error", 1),
    "port_taken": ("OSError: [Errno 98] Address already in use", "", 1),
    "hang": ("", "rank 1 has not answered for 61 s; the run was ended", 1),
    "full_disk": (DIED, "the disk that holds /data, mounted at /data, is full (no space left)", 1),
    "reward_error": ("", "the run is not valid: the reward function failed 8 times at step 1", 1),
    "nonfinite_weights": (
        DIED,
        "the actor's weights as loaded from /m hold inf or nan in a (rank 0); copy it again",
        1,
    ),
    "not_valid": ("", "the run is not valid: metrics were not finite: actor/grad_norm at step 3", 1),
    "bad_configuration": ("", "data.train_files=x is no file", 2),
    "in_use": ("", "/data/run is in use by process 4123 on a3-07, since 2026-11-26 09:12:44; wait for its end", 2),
    "device_error": ("NPU function error: c10_npu::SetDevice(device_id_), error code is 507033", "", 1),
    "host_memory": ("slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0.", "", 1),
    "operator_error": ("RuntimeError: ACL stream synchronize failed, error code:507035", "", 1),
    "unknown": ("KeyError: 'prompt'", "'prompt'", 1),
}


def main() -> int:
    """Run one start."""
    script, steps = Path(sys.argv[1]), int(sys.argv[2])
    config = OmegaConf.from_dotlist([word for word in sys.argv[3:] if "=" in word])
    folder = Path(config.actor_rollout_ref.overlay.measure.output_dir)
    root, files = Path(config.trainer.default_local_dir), RunFiles(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps(sys.argv[3:]) + "\n")
    plan = json.loads(script.read_text())
    number = len((folder / "starts.jsonl").read_text().splitlines()) - 1
    ending = plan[number] if number < len(plan) else None
    if ending and ending["after"] is None:
        return _end(ending["how"], 0, RunFiles(""))
    OmegaConf.save(_resolved(config), folder / "config.yaml")
    done = newest_step(root)[0] or 0 if config.trainer.resume_mode == "auto" else 0
    metrics = folder / "metrics.jsonl"
    kept = metrics.read_text().splitlines() if metrics.exists() else []
    metrics.write_text("".join(f"{line}\n" for line in kept if json.loads(line)["step"] <= done))
    for step in range(done + 1, steps + 1):
        if ending and ending["after"] < step:
            return _end(ending["how"], step, files)
        files.step(step, {"critic/score/mean": step / 7})
        print(f"step:{step}", flush=True)
        if step % 2 == 0:
            _save(root, step)
    files.note("ended", status="finished", message="")
    return 0


def _resolved(config: Any) -> Any:
    sizes = {"actor": {"ppo_micro_batch_size_per_gpu": 8}, "overlay": {"exact_loss": {"enabled": True}}}
    return OmegaConf.merge({"actor_rollout_ref": sizes}, config)


def _end(how: str, step: int, files: RunFiles) -> int:
    if how == "silent":
        os.fork()
        while True:
            signal.pause()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    printed, sentence, code = ENDINGS[how]
    print(printed, flush=True)
    if how == "hang":
        files.fault("not_answering", sentence, step, rank=1, phase="update", seconds=61.0, ended=True, waiting=[0])
    if how == "reward_error":
        files.fault("reward_error", sentence, step, errors=["ValueError"])
    files.note("ended", status="failed", message=sentence)
    report_status(phase="ended", exit_reason=REASONS.get(how))
    return code


def _save(root: Path, step: int) -> None:
    actor = begin_step(root, step) / ACTOR
    actor.mkdir()
    (actor / "weights").write_text(str(step))
    Manifest({"tool": "test"}, files={"weights": hash_file(actor / "weights", lambda _: None)}, complete=True).write(
        actor
    )
    complete_step(root, step, {"step": step})
    publish_step(root, step)


if __name__ == "__main__":
    sys.exit(main())
