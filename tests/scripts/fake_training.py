"""Stands for the training's entry point: writes the same files. Arguments: mode, folder, steps."""

import json
import os
import signal
import sys
import time
from pathlib import Path

STAGES = {
    "gen": 1.5,
    "ref": 0.7,
    "reward": 0.1,
    "adv": 0.0,
    "update_actor": 1.4,
    "reshard": 0.2,
    "offload": 0.1,
    "step": 4.0,
}


def append(path, entry):
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


# Changes of the second step's metrics in some modes; ... leaves a metric out.
WRONG = {
    "skipping": {"actor/nonfinite_steps": 1},
    "nan": {"training/rollout_logprob_diff_max": None},
    "uncompared": {"training/rollout_logprob_diff_max": ...},
    "inexact": {"reshard/weights_exact": 0},
}


def main(mode, folder, steps):
    """Run a mode: good, failing (error after step 1), short (ends early), endless (until a signal), or one of WRONG."""
    overlay = {"applied": ["a:b", "c:d"], "pending": [], "effective": {"a:b": True, "c:d": True}}
    (folder / "overlay.json").write_text(json.dumps(overlay))
    (folder / "config.yaml").write_text(f"trainer: {{n_gpus_per_node: 4, total_training_steps: {steps}}}\n")
    for event in ("ray_ready", "models_ready", "training_begins"):
        append(folder / "events.jsonl", {"time": time.time(), "event": event})
    for step in range(1, steps + 1):
        metrics = {f"timing_s/{stage}": seconds for stage, seconds in STAGES.items()}
        metrics |= {"critic/score/mean": step / steps, "training/rollout_logprob_diff_max": 1e-4 * step}
        metrics |= {"memory/peak_bytes/update": 1 << 20, "reshard/weights_exact": 1}
        metrics |= {"actor/nonfinite_steps": 0, **(WRONG.get(mode, {}) if step == 2 else {})}
        metrics = {name: value for name, value in metrics.items() if value is not ...}
        append(folder / "metrics.jsonl", {"step": step, "time": time.time(), "metrics": metrics})
        if mode == "failing":
            print("Traceback (most recent call last):\nerror: a die ran out of device memory; use more dies")
            return 1
        if mode == "short":
            return 0
    if mode == "endless":
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (folder / "worker").write_text(str(os.getpid()))
            time.sleep(600)
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
