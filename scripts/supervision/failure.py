"""Find out why a start failed from the files that it left, and archive these for a diagnosis."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from post_training.masking.archive import write_archive
from post_training.recovery.causes import Failure, classify
from post_training.recovery.decision import Attempt
from post_training.report.metrics import (
    ENDED,
    LoggedStep,
    ReportError,
    read_entries,
    read_events,
    read_records,
    training_steps,
)
from post_training.report.run_folder import CONFIGURATION, METRICS, read_configuration
from scripts.supervision.run import SupervisedRun
from scripts.supervision.start import KEPT, Start
from verl_patches.features.training_checkpoint.run_records import set_aside_damaged


def failed_attempt(run: SupervisedRun, start: Start, code: int, hang: str | None, nodes: int | None = None) -> Attempt:
    """Collect everything that is known about a start that failed.

    Args:
        run: The supervised run.
        start: The start that failed.
        code: Its exit status.
        hang: A clause if it was ended because it hung.
        nodes: Number of nodes that it ran on, see `Attempt`.
    """
    events, faults, records = _entries_of(run.folder, start)
    said = [each["message"] for each in events if each["event"] == ENDED]
    status = start.status
    sentence, code = said[-1] if said else "", status.exit_code or code
    failure = classify(code, sentence, start.end_of_log(), faults, status.exit_reason)
    failure = failure if hang is None else Failure("hang", hang)
    full_disk = run.full_disk()
    # A training that met a full disk may have had no space left to report it.
    if full_disk and failure.cause not in ("bad_configuration", "interrupted"):
        failure = Failure("full_disk", full_disk)
    checkpoint = run.checkpoint()
    # A start that completed no step is at the step where it resumed, not at that of an earlier start.
    step = max((record.step for record in training_steps(records)), default=checkpoint)
    return Attempt(failure, step, checkpoint, _configuration(run.folder, start), nodes)


def write_bundle(run: SupervisedRun, start: Start) -> str:
    """Make one archive of the last log, the configuration, metrics, faults, samples and versions.

    Secrets are masked, and only the user can read it. Files of earlier starts are in its folder `earlier`.

    Returns:
        A clause that says where the archive is.
    """
    bundle = run.folder / f"failure-{datetime.now().strftime('%Y%m%d-%H%M%S')}.tar.gz"
    unfinished = bundle.with_suffix(".partial")
    versions = run.folder / "versions.txt"
    installed = {f"{each.metadata['Name']}=={each.version}" for each in distributions()}
    try:
        versions.write_text("\n".join(sorted(installed)) + "\n", encoding="utf-8")
        written = {start.log, start.status_file, versions}
        kept = filter(Path.is_file, [*written, *(run.folder / name for name in KEPT)])
        files = {("" if file in written or start.wrote(file) else "earlier/") + file.name: file for file in kept}
        write_archive(unfinished, bundle.name.removesuffix(".tar.gz"), files)
        unfinished.rename(bundle)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        return f"diagnostics are in {run.folder}, because no archive could be written ({error.strerror})"
    finally:
        versions.unlink(missing_ok=True)
    return f"diagnostics saved to {bundle}"


def _entries_of(folder: Path, start: Start) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[LoggedStep]]:
    """Return the events, faults and metrics that this start recorded; none of them if the files cannot be read."""
    try:
        for sentence in set_aside_damaged(folder):
            print(f"warning: {sentence}", file=sys.stderr)
        events = [each for each in read_events(folder) if each["time"] >= start.time]
        faults = read_entries(folder / "faults.jsonl", time=float, kind=str, message=str)
        faults = [each for each in faults if each["time"] >= start.time]
        records = [each for each in read_records(folder / METRICS) if each.time >= start.time]
    except (ReportError, OSError) as error:
        print(f"warning: {error}", file=sys.stderr)
        return [], [], []
    return events, faults, records


def _configuration(folder: Path, start: Start) -> Mapping[str, Any]:
    """Return the configuration that this start resolved; empty if it failed before that."""
    if not start.wrote(folder / CONFIGURATION):
        return {}
    try:
        return read_configuration(folder)
    except ReportError:
        return {}
