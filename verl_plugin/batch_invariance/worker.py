"""One vLLM engine that runs a sample in many batches.

    python -m verl_plugin.batch_invariance.worker JOB RESULT

Without graphs it also searches for operators that depend on the batch, one
after another: an operator that was found is computed one row at a time from
then on, and the search begins again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from post_training.ports import reserve_ports
from verl_plugin.batch_invariance.comparison import Break, compare_log_probs, first_break
from verl_plugin.batch_invariance.engine import PROMPT, Engine, replacement_of
from verl_plugin.batch_invariance.jobs import Job
from verl_plugin.batch_invariance.situations import AGAIN, ALONE, situations_of
from verl_plugin.batch_invariance.trace import OperatorCount, Replacement

_MOST_OPERATORS = 20


def search(engine: Engine) -> tuple[list[dict[str, Any]], str]:
    """Return the operators that depend on the batch, in the order found, and why the search ended early, or ""."""
    replacements: dict[str, Replacement] = {}
    found: list[dict[str, Any]] = []
    for _ in range(_MOST_OPERATORS):
        broken = _broken(engine, replacements)
        if not broken:
            return found, ""
        operator = Counter(each.operator for each in broken.values()).most_common(1)[0][0]
        if operator in replacements:
            return found, f"{operator} depends on the batch even when computed one row at a time"
        named = {name: each for name, each in broken.items() if each.operator == operator}
        situation, first = next(iter(named.items()))
        found.append(dataclasses.asdict(first) | {"situations": list(named), "situation": situation})
        try:
            replacements[operator] = replacement_of(operator)
        except LookupError as error:
            return found, str(error)
    return found, f"more than {_MOST_OPERATORS} operators"


def _broken(engine: Engine, replacements: Mapping[str, Replacement]) -> dict[str, Break]:
    """Return, by situation, the first operator whose result for the sample differs from that of the sample alone."""
    alone, of_alone = engine.traced(ALONE, replacements)
    broken = {}
    for situation in situations_of(engine.job.engines):
        answer, trace = engine.traced(situation, replacements)
        same = compare_log_probs(alone, answer).compared
        first = first_break(of_alone, trace, PROMPT, same)
        if first is not None:
            broken[situation.name] = first
    return broken


def measure(engine: Engine) -> dict[str, Any]:
    """Compare log-probs in all situations with those of the sample alone, and count steps and seconds of the runs."""
    engine.steps = engine.slot_steps = 0
    started = time.monotonic()
    alone, situations = engine.run(ALONE), situations_of(engine.job.engines)
    compared = {each.name: compare_log_probs(alone, engine.run(each)) for each in (AGAIN, *situations)}
    seconds = time.monotonic() - started
    steps, slot_steps = engine.steps, engine.slot_steps
    with OperatorCount() if engine.job.graph == "eager" else nullcontext(OperatorCount()) as counted:
        engine.run(ALONE)
    return {
        "alone": dataclasses.asdict(alone),
        "compared": {name: dataclasses.asdict(each) for name, each in compared.items()},
        "steps": steps,
        "slot_steps": slot_steps,
        "seconds": seconds,
        "calls": dict(counted.calls),
    }


def become_engine(rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of one of two data-parallel engines, each with a die of its own."""
    settings = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": 2, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
    found = {f"VLLM_DP_{name}": str(value) for name, value in settings.items()}
    if "NPU_EMULATOR_NODE" in os.environ:
        # vLLM takes the first die that it sees.
        return found | {"NPU_EMULATOR_NODE": f"{os.environ['NPU_EMULATOR_NODE']}.{rank}"}
    dies = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "0,1").split(",")
    return found | {"ASCEND_RT_VISIBLE_DEVICES": dies[rank]}


def _start_other(arguments: argparse.Namespace) -> None:
    """Start the other engine, and make this process the first one."""
    port = reserve_ports()
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(arguments.job), str(arguments.result)]
    subprocess.Popen([*command, "--follow"], env=os.environ | become_engine(1, port))
    os.environ.update(become_engine(0, port))


def run(job: Job, result: Path, follows: bool) -> NoReturn:
    """Run the job in this process, or be the other one of its engines; write the results at the end, and exit."""
    import vllm_ascend.worker.worker  # noqa: F401  (before parts of it)

    if job.planted:
        __import__(job.planted)
    engine = Engine(job)
    if follows:
        engine.follow()
        os._exit(0)
    found = measure(engine)
    if job.search:
        found["operators"], found["ended"] = search(engine)
    engine.end()
    result.write_text(json.dumps(found))
    os._exit(0)  # do not wait for threads and processes that vLLM started


def main(given: Sequence[str] | None = None) -> None:
    """Read the job, and start its engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--follow", action="store_true", help="be the other one of two engines")
    arguments = parser.parse_args(given)
    values = json.loads(arguments.job.read_text())
    job = Job(**values | {"sizes": tuple(values["sizes"])})
    if job.engines > 1 and not arguments.follow:
        _start_other(arguments)
    run(job, arguments.result, arguments.follow)


if __name__ == "__main__":
    main()
