"""The rehearsal of the stack of 2026, after rehearse.sh has read the command line and set up the environment."""

import os
import shlex
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from post_training.command_parser import CommandParser
from post_training.inherited_environment import EnvironmentRejected, check_inherited, drop_inherited
from post_training.masking import masked_output
from post_training.terminal import escape_output
from rehearsal.stack_2026.jobs import JOBS
from rehearsal.stack_2026.plan import BACKENDS, MODELS, PRECISIONS, WEIGHTS, Options, Plan, make_plan

DONE, FAILED, REJECTED, SIGNALLED = 0, 1, 2, 128
_DESCRIPTION = """
Rehearse a post-training with unmodified verl 0.9.1 and vLLM-Ascend 0.23.0 on emulated dies.

Example:
    bash scripts/rehearse.sh --stack 2026 --model qwen3 --backend fsdp2 --dies 1
"""


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, bool]:
    """Reads the command line that rehearse.sh passes on; the second value is --dry-run."""
    parser = CommandParser(prog="rehearse.sh --stack 2026", description=_DESCRIPTION)
    default = "(default: %(default)s)"
    job = "a job of verl_plugin/config to scale down; model, backend and weights are its own"
    parser.add_argument("--job", choices=JOBS, metavar="NAME", help=job)
    parser.add_argument("--data", type=Path, metavar="FILE", help="problems to train on (default: arithmetic)")
    model = f"family of the tiny model: {', '.join(MODELS)} {default}"
    parser.add_argument("--model", choices=MODELS, default=Options.model, metavar="NAME", help=model)
    backend = f"training engine: {', '.join(BACKENDS)} {default}"
    parser.add_argument("--backend", choices=BACKENDS, default=Options.backend, metavar="NAME", help=backend)
    parser.add_argument("--steps", type=int, default=Options.steps, help=f"training steps {default}")
    parser.add_argument("--seed", type=int, default=Options.seed, help=f"seed of the run {default}")
    parser.add_argument("--dies", type=int, default=Options.dies, help=f"emulated dies {default}")
    memory = f"memory of each die in MiB {default}"
    parser.add_argument(
        "--device-memory", type=int, default=Options.device_memory_mb, dest="device_memory_mb", help=memory
    )
    precision = f"of training and rollout: {' or '.join(PRECISIONS)} {default}"
    parser.add_argument("--precision", choices=PRECISIONS, default=Options.precision, help=precision)
    weights = f"how weights reach the rollout, {' or '.join(WEIGHTS)} (verl's own way) {default}"
    parser.add_argument("--weights", choices=WEIGHTS, default=Options.weights, metavar="NAME", help=weights)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides for the training")
    values = vars(parser.parse_args(arguments))
    dry_run = values.pop("dry_run")
    if values["job"] is not None:
        _take_job(parser, values)
    return Options(**{**values, "overrides": tuple(values["overrides"])}), dry_run


def _take_job(parser: CommandParser, values: dict[str, Any]) -> None:
    """Put what a job decides into the values of the options; what the user gave otherwise stays."""
    job = JOBS[values["job"]]
    for name in ("model", "backend", "weights"):
        if values[name] != parser.get_default(name):
            parser.error(f"--{name}={values[name]} is invalid: --job has its own. Take one of the two away")
    values |= {"model": job.model, "backend": job.backend, "precision": "bfloat16"}
    for override in values["overrides"]:
        key, _, number = override.partition("=")
        # The launcher's user says it as on NPUs; the layout follows the dies.
        if key == "trainer.n_gpus_per_node" and number.isdecimal():
            values["dies"] = int(number)
    for name in ("dies", "steps"):
        if values[name] == parser.get_default(name):
            values[name] = getattr(job, name)


def print_plan(plan: Plan) -> None:
    """Prints what a run would do, as commands that can be copied into a shell."""
    print(f"output\n  {plan.output}\ncheckpoint\n  {plan.checkpoint}\nenvironment")
    for name, value in sorted(plan.environment().items()):
        print(f"  export {name}={shlex.quote(value)}")
    print("commands")
    commands = [] if plan.checkpoint.exists() else [plan.checkpoint_command()]
    for command in (*commands, plan.data_command(), plan.run_command()):
        print("  " + shlex.join(command))


def rehearse(plan: Plan) -> int:
    """Carries out a plan; returns the exit status."""
    import psutil

    from post_training.processes.command import Interrupted, SignalFlag
    from post_training.report import ReportError
    from post_training.run_lock import FolderInUse
    from rehearsal.display import make_console
    from rehearsal.emulated_dies import remove_emulated_dies
    from rehearsal.preflight import PreflightError
    from rehearsal.stack_2026.stages import Rehearsal, print_summary
    from rehearsal.stages import RunFailed
    from verl_patches.trainer.isolated_ray import FolderError, private_folder

    console = make_console()
    try:
        with SignalFlag() as signals:
            # rehearse.sh is this same process, so its start is the start of the user's command.
            launched = psutil.Process().create_time()
            with private_folder("rehearsal", on_removal=remove_emulated_dies) as folder:
                summary = Rehearsal(console, signals, launched).carry_out(replace(plan, folder=folder))
    except (PreflightError, FolderError, FolderInUse) as error:
        return _fail(str(error), REJECTED)
    except ReportError as error:
        return _fail(str(error), FAILED)
    except RunFailed as error:
        return _fail(f"{error}\nThe whole log: {error.log}", FAILED)
    except Interrupted as interrupted:
        return _fail(
            f"{interrupted} ended the run; everything it started has been stopped.", SIGNALLED + interrupted.number
        )
    print_summary(console, summary, plan.output)
    return DONE


def _fail(sentence: str, status: int) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return status


def main() -> int:
    """The command line; returns the exit status."""
    with masked_output():
        options, dry_run = parse_arguments()
        try:
            check_inherited(os.environ)
        except EnvironmentRejected as error:
            return _fail(str(error), REJECTED)
        dropped = drop_inherited(os.environ, emulated=True)
        if dropped:
            print(f"not taken over from the environment, because they are another job's: {' '.join(dropped)}")
        for each in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(each, lambda number, _: sys.exit(SIGNALLED + number))
        plan = make_plan(options, datetime.now().strftime("%Y%m%d-%H%M%S"))
        if dry_run:
            print_plan(plan)
            return DONE
        return rehearse(plan)


if __name__ == "__main__":
    escape_output(standard_output=False)
    sys.exit(main())
