"""The stages of a rehearsal of the stack of 2026: check, prepare, train, report."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from post_training.checkpoint.files import CheckpointError
from post_training.disks import describe_full_disk
from post_training.processes.command import Interrupted, run_to_the_end
from post_training.processes.logs import last_error
from post_training.report import RunFacts, read_records, summarise
from post_training.report.faults import FLOAT32_GATE
from post_training.report.meters import read_meters
from post_training.report.metrics import REWARD, LoggedStep, training_steps
from post_training.report.run_folder import CONFIGURATION, METERS, METRICS
from post_training.run_lock import owning
from post_training.terminal import escaped
from post_training.user_files import FileError, read_object, read_yaml
from rehearsal.display import Progress, emulated_dies, format_duration, peaks_in_words, print_rows
from rehearsal.kept_options import OPTIONS_NAME
from rehearsal.plan import ROOT
from rehearsal.preflight import PreflightError, check_device_memory, check_output, count_parameters
from rehearsal.stack_2026.plan import Options, Rehearsal2026Plan
from rehearsal.stack_2026.records import (
    LOG_PROB_DIFFERENCE,
    PROBABILITY_DIFFERENCE,
    PROBABILITY_DIFFERENCE_MEAN,
    RecordWriter,
    answers_of,
)
from rehearsal.stages import RunFailed, Stages, link_latest
from verl_patches.features.training_checkpoint.run_records import take_back_steps
from verl_plugin.jobs.tokenizers import MODEL, tokenizer_problems
from verl_plugin.resume.step_folders import check_complete, newest_complete

# Keys of a model by which verl makes prompts.
_OF_TOKENIZER = ("path", "tokenizer_path", "custom_chat_template", "trust_remote_code")
_FROM = "trainer.resume_from_path"
# Keys that say where a run begins; a resume sets them anew.
_RESUMING = ("trainer.resume_mode", _FROM)
# Metrics that every step has, and that are finite in a run that learns.
_NUMBERS = (REWARD, "actor/grad_norm", "actor/loss")


class Rehearsal(Stages):
    """Carries out a plan of the stack 2026."""

    def carry_out(self, plan: Rehearsal2026Plan) -> dict[str, Any]:
        """Checks, prepares, trains and reports; returns the summary.

        Raises:
            FolderInUse: another run writes the output folder.
            Interrupted: a signal ended it.
            PreflightError: the folder cannot be written, the model does not fit, the backend is not there, the
                checkpoint to resume from is not complete, or verl cannot use the tokenizer.
            RunFailed: a command failed.
        """
        check_backend(plan.options.backend)
        check_tokenizer(plan.options)
        if not plan.options.resumes:
            given_checkpoint(plan.options)
            check_output(plan.output)
        with owning([plan.output], "rehearsal"):
            try:
                return self._carry_out(plan)
            except Interrupted as interrupted:
                facts = self._facts(plan)
                self._summarise_interrupted(
                    plan.output, lambda failure: write_report(plan.output, facts, failure), interrupted
                )
                raise

    def _carry_out(self, plan: Rehearsal2026Plan) -> dict[str, Any]:
        self._prepare(plan)
        check_device_memory(
            count_parameters(plan.options.given_model or plan.checkpoint),
            plan.options.dies,
            plan.options.device_memory_mb,
        )
        link_latest(plan.output)
        return self._train(self._resumed(plan) if plan.options.resumes else plan)

    def _facts(self, plan: Rehearsal2026Plan) -> RunFacts:
        """Return what a summary says of the run, without its start-up."""
        return RunFacts(
            plan.options.seed,
            plan.options.dies,
            wall_s=time.time() - self.launched,
            precision=plan.options.precision,
        )

    def _prepare(self, plan: Rehearsal2026Plan) -> None:
        """Make the checkpoint, if there is none yet, and the parquet files."""
        plan.output.mkdir(parents=True, exist_ok=True)
        if not plan.options.resumes:
            plan.options.write(plan.output / OPTIONS_NAME)
        if plan.options.given_model is None:
            self._make_checkpoint(plan, plan.options.model)
        if not (plan.options.resumes and plan.train_data.exists() and plan.test_data.exists()):
            self._prepare_step("Making the parquet files", plan.data_command(), plan)

    def _resumed(self, plan: Rehearsal2026Plan) -> Rehearsal2026Plan:
        """Return the plan of a resumed run, after removing the records of steps that will be trained again.

        A run that began with another run's checkpoint continues from its own newest one, if it has any.

        Raises:
            PreflightError: the checkpoint that the user names is not complete.
        """
        RecordWriter(plan.upstream_metrics, plan.output / METRICS).update()
        folder, skipped = newest_complete(plan.checkpoints, _last_step(plan.output))
        if folder is None or _names_checkpoint(plan):
            given = given_checkpoint(plan.options)
            folder, skipped = (folder, skipped) if given is None else (given, [])
        step = 0 if folder is None else int(folder.name.rpartition("_")[2])
        for sentence in skipped:
            self.console.print(f"skipped: {escaped(sentence)}")
        plan.upstream_metrics.unlink(missing_ok=True)
        take_back_steps(str(plan.output), step)
        where = f"after step {step}" if step else f"at step 1, because {plan.checkpoints} has no complete checkpoint"
        self.console.print(f"Continuing {escaped(where)}")
        kept = tuple(word for word in plan.options.overrides if _key(word) not in _RESUMING)
        return replace(plan, resumed=folder, options=replace(plan.options, overrides=kept))

    def _train(self, plan: Rehearsal2026Plan) -> dict[str, Any]:
        steps = plan.steps
        dies = emulated_dies(plan.options.dies)
        self.console.print(f"Training for {steps} steps on {dies}; log: {escaped(str(plan.log))}")
        records = RecordWriter(plan.upstream_metrics, plan.output / METRICS)
        with Progress(self.console, plan.output, steps, self.launched) as progress:

            def show() -> None:
                records.update()
                progress.update()

            try:
                status = run_to_the_end(plan.run_command(), plan.environment(), ROOT, plan.log, self.signals, show)
            finally:
                records.update()
                if plan.composed.exists():
                    shutil.copy(plan.composed, plan.output / CONFIGURATION)
        failure = describe_full_disk([plan.output]) if status != 0 else None
        failure = failure or failure_of(status, progress.records, steps, _compared(plan.options), plan.log)
        failure = failure or lost_answers(progress.records, plan.composed)
        facts = replace(self._facts(plan), startup_s=progress.startup_seconds())
        summary = write_report(plan.output, facts, failure)
        if failure is not None:
            raise RunFailed(failure, plan.log)
        return summary


def _compared(options: Options) -> str | None:
    """Return the precision in which rollout and training compute the same; None if the rollout has older weights."""
    return None if options.rollout_dies else options.precision


def check_backend(backend: str) -> None:
    """Check that the packages that a training engine needs beside the environment can be imported.

    Raises:
        PreflightError: `backend` is mindspeed, and one of its checkouts is missing.
    """
    if backend != "mindspeed":
        return
    for name, project in (("mindspeed", "MindSpeed"), ("megatron.training", "Megatron-LM")):
        if find_spec(name) is None:
            raise PreflightError(
                f"--backend=mindspeed is invalid: {project} cannot be imported. Put checkouts of MindSpeed and "
                "Megatron-LM (core_r0.16.0 of both) on PYTHONPATH, or take --backend megatron."
            )


def _names_checkpoint(plan: Rehearsal2026Plan) -> bool:
    """Whether the command that resumes a run names a checkpoint itself.

    The options of the command that began the run come first, and are among the plan's.
    """
    begun = read_object(plan.output / OPTIONS_NAME)["overrides"]
    return sum(_key(word) == _FROM for word in plan.options.overrides) > sum(_key(word) == _FROM for word in begun)


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def given_checkpoint(options: Options) -> Path | None:
    """Return the folder of the step, of this or another run, from which the user resumes; None if none is given.

    Raises:
        PreflightError: it is not complete.
    """
    given = options.given(_FROM)
    if given is None:
        return None
    folder = Path(given)
    try:
        check_complete(folder)
    except CheckpointError as error:
        raise PreflightError(str(error)) from error
    return folder


def check_tokenizer(options: Options) -> None:
    """Check the tokenizer of the user's own model; the tiny model's suits verl.

    Raises:
        PreflightError: verl's agent loop would fail with it.
    """
    model: dict[str, Any] = {name: options.given(f"{MODEL}.{name}") for name in _OF_TOKENIZER}
    model["trust_remote_code"] = model["trust_remote_code"] in ("true", "True")
    described = Path(model["path"] or "", "config.json")
    try:
        model_type = read_object(described).get("model_type") if described.is_file() else options.model
    except FileError as error:
        raise PreflightError(str(error)) from error
    for problem in tokenizer_problems(model, model_type):
        raise PreflightError(problem)


def _last_step(output: Path) -> int:
    """Return the last step with metrics of a run; 0 if it has none."""
    records = read_records(output / METRICS)
    return records[-1].step if records else 0


def failure_of(status: int, records: Sequence[LoggedStep], steps: int, precision: str | None, log: Path) -> str | None:
    """Return a sentence if the run failed, otherwise None.

    A run has to make all steps with finite metrics, and in float32 rollout and training have to compute alike, unless
    `precision` is None because the rollout has older weights.
    """
    if status != 0:
        return last_error(log)
    reached = records[-1].step if records else 0  # the first step is behind the checkpoint of another run
    if reached < steps:
        return f"The run ended after {reached} of {steps} steps"
    for record in records:
        if record.metrics.get(PROBABILITY_DIFFERENCE) is None:
            return f"Rollout and training were not compared at step {record.step}: {PROBABILITY_DIFFERENCE} is missing"
        for name in _NUMBERS:
            if record.metrics.get(name) is None:
                return f"{name} is not a finite number at step {record.step}"
        difference = record.metrics.get(LOG_PROB_DIFFERENCE)
        if precision == "float32" and difference is not None and difference > FLOAT32_GATE:
            return (
                f"Rollout and training compute differently at step {record.step}: the mean log-probs of an answer "
                f"differ by {difference:.2e} on average, more than {FLOAT32_GATE:g}. Check the log for weights that "
                "did not arrive, or for operators that compute in another type."
            )
    return None


def lost_answers(records: Sequence[LoggedStep], composed: Path) -> str | None:
    """Return a sentence if a step had fewer answers than the configuration asks for, otherwise None.

    verl continues without a prompt whose generation or reward raised an exception.
    """
    config = read_yaml(composed)
    asked = config["data"]["train_batch_size"] * config["actor_rollout_ref"]["rollout"]["n"]
    for record in records:
        trained = answers_of(record.metrics)
        if trained is not None and trained < asked:
            return (
                f"Step {record.step} was trained on {trained} of {asked} answers: verl leaves out a prompt whose "
                'generation or reward fails; the log has "Error in _run_prompt" with the reason'
            )
    return None


def write_report(output: Path, facts: RunFacts, failure: str | None = None) -> dict[str, Any]:
    """Writes summary.json and report.html beside the run's metrics; returns the summary."""
    from post_training.report.run_page import write_page

    records = training_steps(read_records(output / METRICS))
    summary = summarise(records, facts, emulator=read_meters(output / METERS), failure=failure)
    summary |= probability_differences(records)
    (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if (output / CONFIGURATION).exists():  # a run that failed before it had one has nothing to show
        write_page(output)
    return summary


def probability_differences(records: list[LoggedStep]) -> dict[str, float | None]:
    """Return the differences between sampled tokens' probabilities in rollout and training, the largest over all steps.

    `rollout_log_prob_diff_mean` compares the answers' mean log-probs.
    """
    names = {
        "rollout_prob_diff_max": PROBABILITY_DIFFERENCE,
        "rollout_prob_diff_mean": PROBABILITY_DIFFERENCE_MEAN,
        "rollout_log_prob_diff_mean": LOG_PROB_DIFFERENCE,
    }
    found = {
        key: [value for record in records if (value := record.metrics.get(name)) is not None]
        for key, name in names.items()
    }
    return {key: max(values, default=None) for key, values in found.items()}


def print_summary(console: Console, summary: dict[str, Any], output: Path) -> None:
    """Prints the end of a successful run."""

    def shown(name: str, form: str) -> str:
        return "not measured" if summary[name] is None else format(summary[name], form)

    stages = ", ".join(f"{name} {value:.2f}" for name, value in summary["stage_seconds"].items() if value is not None)
    rows = {
        "reward": f"{shown('reward_first', '.3f')} -> {shown('reward_last', '.3f')} (means of the first and the last 5 "
        "steps)",
        "seconds a step": f"{shown('step_seconds', '.2f')}: {stages}",
        "start-up": f"{shown('startup_s', '.1f')} s from the command to the first step",
        "probabilities": f"of sampled tokens: rollout and training differ by at most "
        f"{shown('rollout_prob_diff_max', '.2e')}, {shown('rollout_prob_diff_mean', '.2e')} on average; mean log-probs "
        f"of answers by {shown('rollout_log_prob_diff_mean', '.2e')}",
        "device peak": peaks_in_words(summary),
        "report": str(output / "report.html"),
        "files": str(output),
    }
    title = f"{summary['steps']} steps on {emulated_dies(summary['dies'])}, seed {summary['seed']}"
    console.print(Text(f"\nDone in {format_duration(summary['wall_s'])}: {title}", style="bold"))
    print_rows(console, rows)
