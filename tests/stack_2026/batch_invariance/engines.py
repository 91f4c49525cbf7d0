"""Run engines of `verl_plugin.batch_invariance.worker`, each on emulated dies of its own.

As a program it imports vLLM once, reads a job from each line of its input, forks the job's engines, and writes their
exit codes to its output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from post_training.ports import reserve_ports
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.worker import become_engine, run


class Engines:
    """Runs jobs one after another.

    Args:
        folder: of the logs, models' results and sockets; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(folder), "NPU_EMULATOR_DEVICES": "1",
            "NPU_EMULATOR_CAPACITY_MB": "1024", "OMP_NUM_THREADS": "1", "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_DISABLE_COMPILE_CACHE": "1",
        }  # fmt: skip
        environment.pop("TORCHDYNAMO_DISABLE", None)  # the parts of a model for graphs are found by tracing it
        command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder)]
        self._log = (folder / "engines.log").open("w")
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def run(self, job: Job, mode: str) -> dict[str, Any]:
        """Run a job with VLLM_BATCH_INVARIANT=`mode`, and return its results."""
        self._jobs += 1
        result = self._folder / f"{self._jobs}.json"
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([asdict(job), mode, str(result)]), file=self._process.stdin, flush=True)
        codes = self._process.stdout.readline()
        log = (self._folder / "engines.log").read_text(errors="replace")
        assert codes and not any(json.loads(codes)), f"{codes}{log[-4000:]}"
        return json.loads(result.read_text())

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def _engine(job: Job, mode: str, result: Path, node: str, rank: int, port: int) -> None:
    """Be one engine of a job, in a process of its own."""
    os.environ |= {"VLLM_BATCH_INVARIANT": mode, "NPU_EMULATOR_NODE": node}
    if job.engines > 1:
        os.environ |= become_engine(rank, port)
    try:
        run(job, result, follows=rank > 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def main(folder: Path) -> None:
    """Fork the engines of each job."""
    from tests.stack_2026.vllm_ascend.program import IMPORTED_ONCE
    from tests.vllm_cases import import_once

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    import_once(IMPORTED_ONCE)
    for number, line in enumerate(sys.stdin):
        values, mode, result = json.loads(line)
        job, port = Job(**values | {"sizes": tuple(values["sizes"])}), reserve_ports()
        node = f"batch_invariance.{os.getpid()}.{number}"
        children = []
        for rank in range(job.engines):
            children.append(os.fork())
            if not children[-1]:
                _engine(job, mode, Path(result), node, rank, port)
        codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in children]
        print(json.dumps(codes), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
