"""The rehearsal of the stack of 2026, after rehearse.sh has read the command line and set up the environment."""

import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from post_training.arguments import absolute, whole
from post_training.command_parser import CommandParser
from post_training.masking import masked_output
from post_training.terminal import escape_output
from rehearsal.command_line import DONE, in_private_folder, print_commands, status_of, take_environment
from rehearsal.stack_2026.jobs import JOBS
from rehearsal.stack_2026.plan import (
    BACKENDS,
    MODELS,
    PRECISIONS,
    TOOLS,
    WEIGHTS,
    Options,
    Rehearsal2026Plan,
    make_plan,
)
from rehearsal.tiny_model.architecture import reads_images

_PRECISION_OF_JOBS = "bfloat16"
_DESCRIPTION = """
Rehearse a post-training with unmodified verl 0.9.1 and vLLM-Ascend 0.23.0 on emulated dies.

Example:
    bash scripts/rehearse.sh --stack 2026 --model qwen3 --backend fsdp2 --dies 1
"""


def _parser() -> CommandParser:
    parser = CommandParser(prog="rehearse.sh --stack 2026", description=_DESCRIPTION)
    default = "(default: %(default)s)"
    job = (
        "a job of verl_plugin/config to scale down; model, backend and weights are its own, and it has no tool. "
        "--backend mindspeed keeps MindSpeed's layers, else Megatron-core's replace them"
    )
    parser.add_argument("--job", choices=JOBS, metavar="NAME", help=job)
    parser.add_argument("--data", type=absolute, metavar="FILE", help="problems to train on (default: arithmetic)")
    model = f"family of the tiny model: {', '.join(MODELS)} {default}"
    parser.add_argument("--model", choices=MODELS, default=Options.model, metavar="NAME", help=model)
    backend = f"training engine: {', '.join(BACKENDS)} {default}"
    parser.add_argument("--backend", choices=BACKENDS, default=Options.backend, metavar="NAME", help=backend)
    # A job has its own steps, dies and precision: only None says that the user gave none.
    steps = f"training steps (default: the job's, or {Options.steps})"
    parser.add_argument("--steps", type=whole(1), metavar="N", help=steps)
    parser.add_argument("--seed", type=whole(0), default=Options.seed, metavar="N", help=f"seed of the run {default}")
    dies = f"emulated dies (default: the job's, or {Options.dies})"
    parser.add_argument("--dies", type=whole(1), metavar="N", help=dies)
    apart = "dies that only generate while the others train; needs --weights alltoallv (default: 0, none)"
    parser.add_argument("--rollout-dies", type=whole(0), default=Options.rollout_dies, metavar="N", help=apart)
    memory = f"memory of each die in MiB {default}"
    parser.add_argument(
        "--device-memory",
        type=whole(1),
        default=Options.device_memory_mb,
        dest="device_memory_mb",
        metavar="N",
        help=memory,
    )
    precision = f"of training and rollout: {' or '.join(PRECISIONS)} (default: the job's, or {Options.precision})"
    parser.add_argument("--precision", choices=PRECISIONS, help=precision)
    weights = f"how weights reach the rollout, {' or '.join(WEIGHTS)} (verl's own way) {default}"
    parser.add_argument("--weights", choices=WEIGHTS, default=Options.weights, metavar="NAME", help=weights)
    tool = f"function that the model calls before it answers: {', '.join(TOOLS)} (default: none)"
    parser.add_argument("--tool", choices=TOOLS, metavar="NAME", help=tool)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--resume", type=absolute, metavar="DIR", help="resume the run in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing")
    parser.add_overrides("Hydra overrides for the training")
    return parser


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, bool]:
    """Parse the command line that rehearse.sh passes on; the second value is --dry-run."""
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    dry_run, resumed = values.pop("dry_run"), values.pop("resume")
    if resumed is not None:
        return Options.of_command(parser, values, resumed), dry_run
    if values["job"] is not None:
        _take_job(parser, values)
    for name in ("steps", "dies", "precision"):
        values[name] = getattr(Options, name) if values[name] is None else values[name]
    _check_images(parser, values)
    if (apart := values["rollout_dies"]) and not 0 < apart < values["dies"]:
        parser.error(
            f"--rollout-dies={apart} is invalid: at least one of --dies {values['dies']} has to train. Set it lower"
        )
    if apart and values["weights"] != "alltoallv":
        parser.error(f"--weights={values['weights']} is invalid: it does not reach other dies. Set it to alltoallv")
    return Options(**{**values, "overrides": tuple(values["overrides"])}), dry_run


def _check_images(parser: CommandParser, values: dict[str, Any]) -> None:
    """Reject options with which a model that reads images is not rehearsed."""
    if values["job"] is not None or not reads_images(values["model"]):
        return
    images = f"--model {values['model']} reads images"
    if values["backend"] != "fsdp2":
        reason = "alltoallv has no layout of its vision tower in Megatron"
        parser.error(f"--backend={values['backend']} is invalid: {images}, and {reason}. Set it to fsdp2")
    for name in ("data", "tool"):
        if values[name] is not None:
            own = "its task is drawn" if name == "data" else "the model that calls a tool reads text"
            parser.error(f"--{name}={values[name]} is invalid: {images}, and {own}. Remove it")


def _take_job(parser: CommandParser, values: dict[str, Any]) -> None:
    """Set the options that a job determines; the user's other options stay."""
    job = JOBS[values["job"]]
    # The layers of a job on Megatron are MindSpeed's, which has to be asked for because no registry serves it.
    backend = "mindspeed" if (values["backend"], job.backend) == ("mindspeed", "megatron") else job.backend
    for name in ("model", "backend", "weights", "tool", "rollout_dies"):
        if values[name] not in (parser.get_default(name), backend):
            option = name.replace("_", "-")
            parser.error(f"--{option}={values[name]} is invalid: --job has its own. Remove one of them")
    if values["precision"] not in (None, _PRECISION_OF_JOBS):
        parser.error(f"--precision={values['precision']} is invalid: --job has its own. Remove one of them")
    values |= {"model": job.model, "backend": backend, "precision": _PRECISION_OF_JOBS}
    for override in values["overrides"]:
        key, _, number = override.partition("=")
        # The launcher's user sets the number of dies with the same key as on NPUs; the layout follows it.
        if key == "trainer.n_gpus_per_node":
            try:
                values["dies"] = whole(1)(number)
            except ArgumentTypeError as error:
                parser.error(f"{key}={error}")
    values["dies"] = values["dies"] or job.dies
    values["steps"] = values["steps"] or job.steps


def rehearse(plan: Rehearsal2026Plan) -> int:
    """Carries out a plan; returns the exit status."""
    from rehearsal.display import make_console
    from rehearsal.stack_2026.stages import Rehearsal, print_summary

    console = make_console()

    def run() -> None:
        summary = in_private_folder(
            lambda signals, launched, folder: Rehearsal(console, signals, launched).carry_out(
                replace(plan, folder=folder)
            )
        )
        print_summary(console, summary, plan.output)

    return status_of(run, plan.output)


def main() -> int:
    """The command line; returns the exit status."""
    with masked_output():
        options, dry_run = parse_arguments()
        rejected = take_environment()
        if rejected is not None:
            return rejected
        plan = make_plan(options, datetime.now().strftime("%Y%m%d-%H%M%S"))
        if dry_run:
            print_commands(plan)
            return DONE
        return rehearse(plan)


if __name__ == "__main__":
    escape_output(standard_output=False)
    sys.exit(main())
