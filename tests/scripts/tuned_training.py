"""A training whose speed and reward follow from its settings; it writes only the files that a run writes.

Usage: tuned_training.py FOLDER KEY=VALUE...; every start appends its overrides to FOLDER/starts.jsonl. While
FOLDER/hold exists, the start with the number in it (the first is 1) waits after its first step until it is ended.
"""

import json
import sys
import time
from pathlib import Path

MICRO, SHARE = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
)


def main(folder: Path, words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    output, steps = (
        Path(given["actor_rollout_ref.overlay.measure.output_dir"]),
        int(given["trainer.total_training_steps"]),
    )
    with (folder / "starts.jsonl").open("a") as file:
        file.write(json.dumps(words) + "\n")
    number = len((folder / "starts.jsonl").read_text().splitlines())
    hold = folder / "hold"
    held = int(hold.read_text()) if hold.exists() else 0
    output.mkdir(parents=True)
    (output / "config.yaml").write_text(
        "data: {train_batch_size: 4}\nactor_rollout_ref: {rollout: {n: 2}}\ntrainer: {n_gpus_per_node: 4, nnodes: 1}\n"
    )
    micro, share = int(given[MICRO]), float(given[SHARE])
    if micro == 4 and number != held:
        sys.exit("error: a die ran out of device memory; use smaller micro batches")
    seconds = 4 / micro + 10 * (share - 0.6) ** 2
    lengths = {"prompt_length/mean": 10.0, "response_length/mean": 20.0}
    for step in range(1, steps + 1):
        metrics = {"timing_s/step": seconds, "critic/score/mean": share, **lengths}
        with (output / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "metrics": metrics}) + "\n")
        if number == held:
            time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
