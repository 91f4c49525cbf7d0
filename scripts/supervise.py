#!/usr/bin/env python3
r"""Run a training and restart it when it fails, as a policy says.

Each restart resumes from the newest checkpoint, after a wait, and with smaller micro batches where a die ran out of
memory.

Example, the 256-die job; run it on every node, with the same arguments:
    python scripts/supervise.py --output outputs/supervised -- \
        bash scripts/train_deepseekv3_256die_true_weight.sh --cluster FILE

The command gets Hydra overrides at its end: the output folder, the checkpoint folder, trainer.resume_mode=auto. A node
that gives its dies to another node's training restarts with it, and ends when that node's supervisor says so. With
--elastic the training continues on fewer nodes when some are lost, and on all again when they return.

Exit codes: 0 the training finished; 1 it failed and is not restarted; 2 arguments or policy rejected, the folder is in
use, or the training rejected its configuration; 129 hung up; 130 Ctrl-C; 131 quit; 143 terminated.
"""

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import finite, whole  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.disks import FULL  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.plan.fewer_nodes import Layouts  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag  # noqa: E402
from post_training.recovery.decision import Supervision  # noqa: E402
from post_training.recovery.policy import Policy, PolicyError, read_policy  # noqa: E402
from post_training.run_lock import FolderInUse, LivingOwners, owning  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from scripts.supervision.elastic import Elastic, Patience  # noqa: E402
from scripts.supervision.launched_job import LaunchedJob, describe_launched, plan_layouts  # noqa: E402
from scripts.supervision.run import SupervisedRun  # noqa: E402
from scripts.supervision.supervisor import SIGNALLED, Supervisor, wait  # noqa: E402

_ROLE = "supervise-"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the arguments, supervise, and return the exit code."""
    options = _options(arguments)
    with masked_output():
        return _main(options)


def _main(options: argparse.Namespace) -> int:
    try:
        policy = read_policy(options.policy) if options.policy else Policy()
    except PolicyError as error:
        return _reject(str(error))
    run = SupervisedRun.prepared(options.command, options.output)
    try:
        job = describe_launched(options.command) if options.elastic else None
    except ValueError as error:
        return _reject(f"{error}.")
    if options.dry_run:
        print(shlex.join(run.command({})))
        return 0
    if shutil.which(options.command[0]) is None:
        return _reject(f"Command not found: {options.command[0]}. Pass a launcher after --, such as bash and its path.")
    with ExitStack() as stack:
        try:
            # Every node of a job has one supervisor in the folder that all of them share.
            stack.enter_context(owning([run.folder], f"{_ROLE}{_node()}"))
        except FolderInUse as error:
            return _reject(str(error))
        except OSError as error:
            full_disk = run.full_disk() if error.errno in FULL else None
            if full_disk:
                print(f"error: {full_disk}", file=sys.stderr)
                return 1
            return _reject(
                f"--output={run.folder} is invalid: it cannot be created ({error.strerror}). Choose another folder."
            )
        return _supervise(run, job, policy, options)


def _supervise(run: SupervisedRun, job: LaunchedJob | None, policy: Policy, options: argparse.Namespace) -> int:
    try:
        with SignalFlag() as signals:
            try:
                elastic = _elastic(job, run, options, signals) if job else None
            except ValueError as error:
                return _reject(f"{error}.")
            return Supervisor(run, Supervision(policy), options.silent_after, signals, elastic).supervise()
    except Interrupted as interrupted:
        return SIGNALLED + interrupted.number


def _node() -> str:
    """Return a name for this node: two nodes on one machine differ in their network namespace or in Slurm's name."""
    network = Path("/proc/self/ns/net").stat().st_ino
    return os.environ.get("SLURMD_NODENAME") or f"{os.uname().nodename}-{network}"


def _elastic(job: LaunchedJob, run: SupervisedRun, options: argparse.Namespace, signals: SignalFlag) -> Elastic:
    """Return the object that decides on how many nodes the head's job starts. Raises ValueError: see `plan_layouts`."""
    own = run.own_overrides({})

    def layouts(overrides: Sequence[str]) -> Layouts:
        try:
            return plan_layouts(job, [*own, *overrides], options.min_nodes, options.die_memory)
        except ValueError:
            # Ctrl-C reaches the plan's process too.
            if signals.received:
                raise Interrupted(signals.received[0]) from None
            raise

    elastic = Elastic(
        layouts,
        LivingOwners(run.folder, _ROLE).look,
        run.checkpoint,
        Patience(options.wait_for_nodes, options.look_for_nodes),
        run.record,
        lambda seconds: wait(seconds, signals),
    )
    run.record(elastic.describe())
    return elastic


def _reject(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__, usage="%(prog)s [OPTIONS] -- COMMAND")
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="retry_options in YAML (default: docs/operations.md)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for the run, its checkpoints and the logs of each start"
    )
    parser.add_argument(
        "--silent-after",
        type=finite(above=0, highest=30 * 86400),
        default=7200,
        metavar="SECONDS",
        help="the training hangs after this long without output and without progress of any rank in heartbeat.json "
        "(default: 7200); the training itself detects a single hung rank",
    )
    _add_elastic_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the first command, and start nothing")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="a launcher or entry point, after --"
    )
    options = parser.parse_args(arguments)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error(
            "Command missing. Pass one after --, such as -- bash scripts/train_qwen2_5_0_5b_gsm8k.sh --model DIR"
        )
    if "--emulate" in options.command or any(Path(word).name == "rehearse.sh" for word in options.command):
        parser.error("A rehearsal resumes with its own --resume. Pass the real training")
    return options


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    elastic = parser.add_argument_group("with fewer nodes (docs/operations.md)")
    elastic.add_argument(
        "--elastic",
        action="store_true",
        help="continue on the remaining nodes when some are lost for good, in a layout of plan.py --fewer-nodes, and "
        "on all again when they return",
    )
    elastic.add_argument(
        "--min-nodes", type=whole(1), default=1, help="stop with fewer nodes than this (default: %(default)s)"
    )
    longest = 30 * 86400
    elastic.add_argument(
        "--wait-for-nodes",
        type=finite(lowest=0, highest=longest),
        default=600,
        metavar="SECONDS",
        help="a start waits this long for lost nodes (default: %(default)s)",
    )
    elastic.add_argument(
        "--look-for-nodes",
        type=finite(above=0, highest=longest),
        default=60,
        metavar="SECONDS",
        help="time between two looks for returned nodes; the training uses them from the next checkpoint (default: "
        "%(default)s)",
    )
    elastic.add_argument(
        "--die-memory",
        metavar="SIZE",
        help="usable memory of a die (default: DIE_MEMORY of the cluster's file, or 61GiB)",
    )


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
