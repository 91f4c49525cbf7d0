"""The rehearsal after rehearse.sh has read the command line and set up the environment."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from post_training.arguments import absolute
from post_training.command_parser import CommandParser
from post_training.masking import masked_output
from post_training.report.run_folder import at
from post_training.terminal import escape_output
from rehearsal.command_line import DONE, in_private_folder, print_commands, status_of, take_environment
from rehearsal.jobs import DEFAULT_JOB, JOBS
from rehearsal.plan import CHIPS, ROOT, Options, RehearsalPlan, job_of, make_plan
from rehearsal.tiny_model.architecture import TINY_MODELS, reads_images

_DESCRIPTION = """
Rehearse a post-training job on emulated dies, in the environment that rehearse.sh sets up.

Example:
    bash scripts/rehearse.sh --steps 5 --seed 2
"""
ENVIRONMENT_PYTHON = ROOT / ".venv" / "bin" / "python"
PLANNED_KEYS = (
    "trainer.total_training_steps",
    "trainer.n_gpus_per_node",
    "data.seed",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.recompute_old_log_prob",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.overlay.rollout.expert_parallel_size",
)


def parse_arguments(arguments: list[str] | None = None) -> tuple[Options, bool]:
    """Parse the command line that rehearse.sh passes on; the second value is --dry-run."""
    parser = CommandParser(prog="rehearse.sh", description=_DESCRIPTION)
    parser.add_argument("--job", choices=JOBS, default=DEFAULT_JOB, metavar="NAME", help="the job to scale down")
    parser.add_argument("--data", type=absolute, metavar="FILE", help="problems to train on (default: data/arithmetic)")
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--seed", type=int, default=Options.seed, help="seed of the run (default: %(default)s)")
    parser.add_argument("--dies", type=int, help="emulated dies")
    memory = "memory of each die in MiB (default: %(default)s)"
    parser.add_argument(
        "--device-memory", type=int, default=Options.device_memory_mb, dest="device_memory_mb", help=memory
    )
    parser.add_argument(
        "--chip", choices=sorted(CHIPS), default=Options.chip, help="the chip to emulate (default: %(default)s)"
    )
    parser.add_argument("--stream-seed", type=int, help="run streams late, in an order drawn from this seed")
    parser.add_argument("--model", choices=sorted(TINY_MODELS), metavar="NAME", help="family of the tiny model")
    parser.add_argument(
        "--recipe", choices=("grpo", "dapo", "ppo"), default=Options.recipe, help="default: %(default)s"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--resume", type=absolute, metavar="DIR", help="resume the run in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing")
    parser.add_overrides("Hydra overrides for the training")
    values = vars(parser.parse_args(arguments))
    dry_run, resumed = values.pop("dry_run"), values.pop("resume")
    if resumed is not None:
        return Options.of_command(parser, values, resumed), dry_run
    if values["model"] and values["job"] != DEFAULT_JOB:
        parser.error(f"--model is for the job {DEFAULT_JOB}, but {values['job']} has its own. Remove one of them")
    job = job_of(values["job"], values["model"])
    if values["data"] is not None and reads_images(values["model"] or job.model_type):
        parser.error(f"--data={values['data']} is invalid: the model is trained on drawn images. Remove it")
    values["dies"] = values["dies"] or job.dies
    return Options(**{**values, "overrides": tuple(values["overrides"])}), dry_run


def print_plan(plan: RehearsalPlan, config: Mapping[str, Any] | None) -> None:
    """Prints what a run would do, as commands that can be copied into a shell."""
    if config is not None:
        print("configuration")
        for key in PLANNED_KEYS:
            value = at(config, key)
            if value is not None:  # the other back-end's keys are not there
                print(f"  {key} = {value}")
    print_commands(plan, ENVIRONMENT_PYTHON)


def rehearse(plan: RehearsalPlan, dry_run: bool) -> int:
    """Carry out a plan, or only check and print it; return the exit status."""
    from rehearsal.display import make_console, print_summary
    from rehearsal.stages import Rehearsal, check_before_anything

    console = make_console()

    def run() -> None:
        if dry_run:
            print_plan(plan, check_before_anything(plan))
            return
        summary = in_private_folder(
            lambda signals, launched, folder: Rehearsal(console, signals, launched).carry_out(
                replace(plan, folder=folder)
            )
        )
        print_summary(console, summary, plan.output)

    return status_of(run, plan.output)


def main() -> int:
    """Run the command line; return the exit status."""
    with masked_output():
        return _main()


def _main() -> int:
    options, dry_run = parse_arguments()
    rejected = take_environment()
    if rejected is not None:
        return rejected
    plan = make_plan(options, datetime.now().strftime("%Y%m%d-%H%M%S"))
    if dry_run and find_spec("hydra") is None:
        # Without the environment there is nothing to compose the configuration with.
        print_plan(plan, None)
        return DONE
    return rehearse(plan, dry_run)


if __name__ == "__main__":
    escape_output(standard_output=False)
    sys.exit(main())
