"""The stages of a rehearsal: check, prepare, train, report."""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from post_training.data import read_problems
from post_training.disks import describe_full_disk
from post_training.models.families import family_of
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end
from post_training.processes.logs import last_error, last_line
from post_training.report import LoggedStep, ReportError, RunFacts, read_records, summarise
from post_training.report.faults import RunFaults
from post_training.report.meters import read_meters
from post_training.report.metrics import training_steps
from post_training.report.run_folder import CONFIGURATION
from post_training.run_lock import FolderLock, owning
from post_training.terminal import escaped
from rehearsal.display import Progress, emulated_dies
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.lengths import measured_settings
from rehearsal.plan import ROOT, RUNS, RehearsalPlan
from rehearsal.preflight import (
    PreflightError,
    check_device_memory,
    check_output,
    check_rows,
    compose_checked,
    count_parameters,
    is_whole,
)
from rehearsal.run_plan import RunPlan
from rehearsal.tiny_model.architecture import TINY_MODELS
from verl_patches.features.measure.run_files import read_executed, read_faults
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_patches.features.training_checkpoint.step_folders import newest_step, step_of


class RunFailed(Exception):
    """A command of the run failed; holds the sentence for the user and the log with the details."""

    def __init__(self, sentence: str, log: Path) -> None:
        super().__init__(sentence)
        self.log = log


def check_before_anything(plan: RehearsalPlan) -> Mapping[str, Any]:
    """Make all checks that need no output of the run; return the composed configuration.

    Raises:
        DataError, PreflightError: the data or the configuration cannot be used.
    """
    if not plan.options.resumes:
        check_output(plan.output)
    if plan.options.data is not None:
        read_problems(plan.options.data)
    return compose_checked(plan)


@dataclass(frozen=True)
class Stages:
    """The stages that rehearsals of both stacks share.

    Progress goes to ``console``, and a signal in ``signals`` stops them. ``launched`` is the Unix time at which the
    user started the command; all times shown count from it.
    """

    console: Console
    signals: SignalFlag
    launched: float

    def _make_checkpoint(self, plan: RunPlan, model_type: str) -> None:
        """Make the tiny model if it does not exist or is damaged."""
        if plan.checkpoint.exists() and not is_whole(plan.checkpoint):
            if not os.access(plan.checkpoint.parent, os.W_OK | os.X_OK):
                raise PreflightError(
                    f"{plan.checkpoint} is damaged, and only {plan.checkpoint.owner()} can make it again. Let them "
                    "remove it, or use a checkout of your own."
                )
            self.console.print(f"{escaped(str(plan.checkpoint))} is damaged; making it again")
            shutil.rmtree(plan.checkpoint)
        if not plan.checkpoint.exists():
            name = family_of(TINY_MODELS[model_type]).name
            self._prepare_step(f"Making the tiny {name} checkpoint", plan.checkpoint_command(), plan)

    def _prepare_step(self, title: str, command: list[str], plan: RunPlan) -> None:
        started, log = time.monotonic(), plan.output / "logs" / "prepare.log"
        with self.console.status(f"{title} ...") as line:

            def show_last_line() -> None:
                line.update(Text(f"{title} ... {escaped(last_line(log))}"))

            status = run_to_the_end(command, plan.environment(), ROOT, log, self.signals, show_last_line)
        if status != 0:
            raise RunFailed(f"{title} failed: {last_error(log)}", log)
        self.console.print(f"{title:<46}{time.monotonic() - started:5.0f} s")

    def _summarise_interrupted(self, output: Path, write: Callable[[str], object], interrupted: Interrupted) -> None:
        """Write the summary of an interrupted run, and its report if it had begun, by calling ``write``."""
        try:
            write(f"interrupted by {interrupted}")
        except (OSError, ReportError) as error:
            self.console.print(f"warning: {output} has no summary: {error}")


class Rehearsal(Stages):
    """Carries out a plan of the stack 2025."""

    def carry_out(self, plan: RehearsalPlan) -> dict[str, Any]:
        """Checks, prepares, trains and reports; returns the summary.

        Raises:
            DataError, PreflightError: the input cannot be used.
            FolderInUse: another run writes the output folder.
            Interrupted: a signal ended it.
            RunFailed: a command failed.
        """
        config = check_before_anything(plan)
        # A training that was started without a rehearsal owns the folder in the role of its own.
        FolderLock(plan.output, "run").check_free()
        with owning([plan.output], "rehearsal"):
            try:
                return self._carry_out(plan)
            except Interrupted as interrupted:
                facts = self._facts(plan, config)
                self._summarise_interrupted(
                    plan.output, lambda failure: write_report(plan.output, facts, failure), interrupted
                )
                raise

    def _carry_out(self, plan: RehearsalPlan) -> dict[str, Any]:
        plan = self._prepare(plan)
        config = compose_checked(plan)
        check_rows(plan, config)
        check_device_memory(
            count_parameters(plan.options.given_model or plan.checkpoint),
            plan.options.dies,
            plan.options.device_memory_mb,
        )
        link_latest(plan.output)
        return self._train(plan, config)

    def _prepare(self, plan: RehearsalPlan) -> RehearsalPlan:
        """Makes checkpoint and parquet files; returns the plan with the settings that follow from the data."""
        plan.output.mkdir(parents=True, exist_ok=True)
        if not plan.options.resumes:
            plan.options.write(plan.output / OPTIONS_NAME)
        if plan.options.given_model is None:
            self._make_checkpoint(plan, plan.options.model_type)
        if not (plan.options.resumes and plan.train_data.exists() and plan.test_data.exists()):
            self._prepare_step("Making the parquet files", plan.data_command(), plan)
        if plan.options.data is None:
            return plan
        return plan.with_overrides(
            measured_settings(plan.train_data, plan.options.given_model or plan.checkpoint, plan.options.dies)
        )

    def _train(self, plan: RehearsalPlan, config: Mapping[str, Any]) -> dict[str, Any]:
        steps = config["trainer"]["total_training_steps"]
        if plan.options.resumes:
            self._go_back(plan, config["trainer"])
        dies = emulated_dies(plan.options.dies)
        self.console.print(f"Training for {steps} steps on {dies}; log: {escaped(str(plan.log))}")
        command, environment = plan.run_command(), plan.environment()
        with Progress(self.console, plan.output, steps, self.launched) as progress:
            status = run_to_the_end(command, environment, ROOT, plan.log, self.signals, progress.update)
        full_disk = describe_full_disk([plan.output]) if status != 0 else None
        if full_disk:  # the log and a report may be on it
            raise RunFailed(full_disk, plan.log)
        facts = replace(
            self._facts(plan, config),
            startup_s=progress.startup_seconds(),
            startup_events=progress.event_seconds(),
        )
        failure = failure_of(status, progress.records, steps, facts.precision, plan.log)
        summary = write_report(plan.output, facts, failure)
        if failure is not None:
            raise RunFailed(failure, plan.log)
        return summary

    def _facts(self, plan: RehearsalPlan, config: Mapping[str, Any]) -> RunFacts:
        """Return what a summary says of the run, without its start-up."""
        precision = config["actor_rollout_ref"]["overlay"]["precision"]
        return RunFacts(plan.options.seed, plan.options.dies, wall_s=time.time() - self.launched, precision=precision)

    def _go_back(self, plan: RehearsalPlan, options: Mapping[str, Any]) -> None:
        """Remove the records of steps that will be trained again, and print from which step the run resumes."""
        checkpoints = Path(options["default_local_dir"])
        step, skipped = newest_step(checkpoints)
        if options["resume_mode"] == "resume_path":
            try:
                step, skipped = step_of(Path(options["resume_from_path"])), []
            except ValueError as error:
                raise PreflightError(str(error)) from error
        for sentence in skipped:
            self.console.print(f"skipped: {escaped(sentence)}")
        take_back_steps(str(plan.output), step or 0)
        where = f"after step {step}" if step else f"at step 1, because {checkpoints} has no complete checkpoint"
        self.console.print(f"Continuing {escaped(where)}")


def failure_of(status: int, records: Sequence[LoggedStep], steps: int, precision: str, log: Path) -> str | None:
    """Return a sentence if the run failed, otherwise None.

    If the driver reports success, the metrics are checked once more.
    """
    if status != 0:
        return last_error(log)
    reached = max((record.step for record in records), default=0)
    if reached < steps:
        return f"The run ended after {reached} of {steps} steps"
    faults = RunFaults(precision)
    for record in records:
        faults.add(record.step, record.metrics)
    return faults.sentence()


def write_report(output: Path, facts: RunFacts, failure: str | None = None) -> dict[str, Any]:
    """Writes summary.json beside the run's metrics, report.html and, if there is a step to draw, report.png.

    Returns the summary.
    """
    # Imported here: matplotlib takes a second, and the run has then long begun.
    from post_training.report.picture import draw
    from post_training.report.run_page import write_page

    records = training_steps(read_records(output / "metrics.jsonl"))
    overlay_file = output / "overlay.json"
    overlay = json.loads(overlay_file.read_text()) if overlay_file.exists() else None
    if overlay is not None:
        overlay["executed"] = read_executed(output)
    summary = summarise(records, facts, overlay, read_meters(output / "meters"), read_faults(output), failure)
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    title = f"GRPO rehearsal: {len(records)} steps, seed {facts.seed}, {emulated_dies(facts.dies)}"
    if records:
        draw(records, title, output / "report.png")
    if (output / CONFIGURATION).exists():  # a run that failed before it had one has nothing to show
        write_page(output)
    return summary


def link_latest(output: Path) -> None:
    """Points the link ``latest`` at a run's folder, in one step; runs written elsewhere are not linked."""
    if output.parent != RUNS:
        return
    partial = RUNS / f".latest.{os.getpid()}"
    partial.symlink_to(output.name)
    partial.replace(RUNS / "latest")
