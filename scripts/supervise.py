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
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import absolute, finite, whole  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.disks import FULL, describe_full_disk  # noqa: E402
from post_training.masking import masked, masked_output  # noqa: E402
from post_training.masking.archive import write_archive  # noqa: E402
from post_training.overrides import setting  # noqa: E402
from post_training.plan.fewer_nodes import Layout, Layouts  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.processes.descendants import wait_until  # noqa: E402
from post_training.recovery.causes import RAY_ENDED, Failure, classify  # noqa: E402
from post_training.recovery.decision import Again, Attempt, Supervision  # noqa: E402
from post_training.recovery.policy import Policy, PolicyError, read_policy  # noqa: E402
from post_training.report.heartbeat import read_progress  # noqa: E402
from post_training.report.metrics import (  # noqa: E402
    ENDED,
    ReportError,
    read_entries,
    read_events,
    read_records,
    training_steps,
)
from post_training.report.nodes import SUPERVISION  # noqa: E402
from post_training.report.run_folder import CONFIGURATION, METRICS, read_configuration  # noqa: E402
from post_training.run_lock import FolderInUse, LivingOwners, owning  # noqa: E402
from post_training.start_status import VARIABLE as STATUS_FILE  # noqa: E402
from post_training.start_status import StartStatus  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from scripts.supervision.elastic import Elastic, NodesReturned, NoLayout, Patience  # noqa: E402
from scripts.supervision.launched_job import LaunchedJob, describe_launched, plan_layouts, with_options  # noqa: E402
from verl_patches.features.training_checkpoint.run_records import set_aside_damaged  # noqa: E402
from verl_patches.features.training_checkpoint.step_folders import newest_step  # noqa: E402

_OUTPUT, _CHECKPOINTS = "actor_rollout_ref.overlay.measure.output_dir", "trainer.default_local_dir"
_RESUME = "trainer.resume_mode"
_ROLE = "supervise-"
_LOG_BYTES, _SIGNALLED = 400_000, 128
_HEARTBEAT_S = 1.0
# On a node that gives its dies to another one's training: seconds after the end of a start in which the supervisor of
# that one has said what follows.
_DECIDED_S = 60.0
_KEPT = (CONFIGURATION, METRICS, "events.jsonl", "faults.jsonl", "samples.last.json", "overlay.json", SUPERVISION)


def main(arguments: Sequence[str] | None = None) -> int:
    """Supervises; returns the exit code."""
    options = _options(arguments)
    with masked_output():
        return _main(options)


def _main(options: argparse.Namespace) -> int:
    try:
        policy = read_policy(options.policy) if options.policy else Policy()
    except PolicyError as error:
        return _reject(str(error))
    supervised = Supervised.prepared(options.command, options.output)
    try:
        job = describe_launched(options.command) if options.elastic else None
    except ValueError as error:
        return _reject(f"{error}.")
    if options.dry_run:
        print(shlex.join(supervised.command({})))
        return 0
    if shutil.which(options.command[0]) is None:
        return _reject(f"{options.command[0]} is no command: give a launcher behind --, such as bash and its path.")
    with ExitStack() as stack:
        try:
            # Every node of a job has one supervisor in the folder that all of them share.
            stack.enter_context(owning([supervised.folder], f"{_ROLE}{_node()}"))
        except FolderInUse as error:
            return _reject(str(error))
        except OSError as error:
            full_disk = supervised.full_disk() if error.errno in FULL else None
            if full_disk:
                print(f"error: {full_disk}", file=sys.stderr)
                return 1
            return _reject(f"--output {supervised.folder} cannot be made ({error.strerror}): choose another folder.")
        try:
            with SignalFlag() as signals:
                elastic = _elastic(job, supervised, options, signals) if job else None
                return _supervise(supervised, Supervision(policy), options.silent_after, signals, elastic)
        except Interrupted as interrupted:
            return _SIGNALLED + interrupted.number
        except ValueError as error:
            return _reject(f"{error}.")


def _node() -> str:
    """This node among those of the job: two of them on one machine differ in their network, or by Slurm's name."""
    network = Path("/proc/self/ns/net").stat().st_ino
    return os.environ.get("SLURMD_NODENAME") or f"{os.uname().nodename}-{network}"


def _elastic(job: LaunchedJob, supervised: "Supervised", options: argparse.Namespace, signals: SignalFlag) -> Elastic:
    """What decides on how many nodes the job of this head starts. Raises ValueError: see `plan_layouts`."""
    own = supervised.own_overrides({})

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
        LivingOwners(supervised.folder, _ROLE).look,
        supervised.checkpoint,
        Patience(options.wait_for_nodes, options.look_for_nodes),
        lambda sentence: _say(supervised, sentence),
        lambda seconds: _wait(seconds, signals),
    )
    _say(supervised, elastic.describe())
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
        parser.error("no command: give one after --, such as -- bash scripts/train_qwen2_5_0_5b_gsm8k.sh --model DIR")
    if "--emulate" in options.command or any(Path(word).name == "rehearse.sh" for word in options.command):
        parser.error("a rehearsal resumes by its own --resume: give the training that it stands for")
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
        "--min-nodes", type=whole(1), default=1, help="end with fewer nodes than this (default: %(default)s)"
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
        help="time between two looks for returned nodes; the training takes them at the next checkpoint "
        "(default: %(default)s)",
    )
    elastic.add_argument(
        "--die-memory",
        metavar="SIZE",
        help="usable memory of a die (default: DIE_MEMORY of the cluster's file, or 61GiB)",
    )


@dataclass(frozen=True)
class Supervised:
    """A command, the folder of its run, and the one of its checkpoints; attempts write their logs into the first."""

    given: tuple[str, ...]
    folder: Path
    checkpoints: Path

    @classmethod
    def prepared(cls, command: Sequence[str], output: Path | None) -> "Supervised":
        """The folders are those of the command's own overrides, else below ``output``."""
        time_of_start = datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = _given(command, _OUTPUT) or output or ROOT / "outputs" / "supervised" / time_of_start
        folder = absolute(folder)
        checkpoints = absolute(_given(command, _CHECKPOINTS) or folder / "checkpoints")
        return cls(tuple(command), folder, checkpoints)

    def command(self, overrides: Mapping[str, int | float], layout: Layout | None = None) -> list[str]:
        """The command with our overrides behind its own; a launcher takes them behind ``--``.

        Args:
            overrides: of smaller micro batches and the like.
            layout: the one of fewer nodes than the job is configured for.
        """
        own = [*self.own_overrides(overrides), *(layout.overrides if layout else ())]
        is_launcher = any(word.endswith(".sh") for word in self.given)
        separator = ["--"] if is_launcher and "--" not in self.given else []
        given = with_options(self.given, ["--nodes", str(layout.nodes)]) if layout else list(self.given)
        return [*given, *separator, *own]

    def own_overrides(self, overrides: Mapping[str, int | float]) -> list[str]:
        """Where the run writes, that it goes on, and these."""
        own = [setting(_OUTPUT, self.folder), setting(_CHECKPOINTS, self.checkpoints), f"{_RESUME}=auto"]
        return [*own, *_words(overrides)]

    def checkpoint(self) -> int:
        """The step of the newest complete checkpoint, 0 where there is none."""
        return newest_step(self.checkpoints)[0] or 0

    def full_disk(self) -> str | None:
        """One sentence if a disk has no space that this or the training writes to."""
        return describe_full_disk((self.folder, self.checkpoints))

    def attempt(self, code: int, log: Path, began: "Began", hang: str | None, nodes: int | None = None) -> Attempt:
        """What is known of a start that failed, or was ended because of a hang. nodes: see `Attempt`."""
        try:
            for sentence in set_aside_damaged(self.folder):
                print(f"warning: {sentence}", file=sys.stderr)
            events = [each for each in read_events(self.folder) if each["time"] >= began.time]
            faults = read_entries(self.folder / "faults.jsonl", time=float, kind=str, message=str)
            faults = [each for each in faults if each["time"] >= began.time]
            records = [each for each in read_records(self.folder / METRICS) if each.time >= began.time]
        except (ReportError, OSError) as error:
            print(f"warning: {error}", file=sys.stderr)
            events, faults, records = [], [], []
        said = [each["message"] for each in events if each["event"] == ENDED]
        status = _status(log)
        sentence, code = said[-1] if said else "", status.exit_code or code
        failure = classify(code, sentence, _end_of(log), faults, status.exit_reason)
        failure = failure if hang is None else Failure("hang", hang)
        full_disk = self.full_disk()
        # What the training said of it has no room there either.
        if full_disk and failure.cause not in ("bad_configuration", "interrupted"):
            failure = Failure("full_disk", full_disk)
        checkpoint = self.checkpoint()
        # Without a step of its own it stands where it went on from, and not where an earlier start had come to.
        step = max((record.step for record in training_steps(records)), default=checkpoint)
        return Attempt(failure, step, checkpoint, _configuration(self.folder, began), nodes)


@dataclass(frozen=True)
class Began:
    """What a start finds, by which what it writes is told from what earlier ones left.

    time: Unix seconds, by which the files of records are told apart. files: size and time of change of those that are
    replaced whole, as the file system says them: its clock may be a server's.
    """

    time: float
    files: Mapping[str, tuple[int, int, int]]

    @classmethod
    def now(cls, folder: Path) -> "Began":
        """A start that begins now."""
        return cls(time.time(), {name: found for name in _KEPT if (found := _identity(folder / name))})

    def wrote(self, file: Path) -> bool:
        """Whether this start has written the file."""
        found = _identity(file)
        return found is not None and found != self.files.get(file.name)


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _words(overrides: Mapping[str, int | float]) -> list[str]:
    return [f"{key}={value}" for key, value in overrides.items()]


def _supervise(
    supervised: Supervised,
    supervision: Supervision,
    silent_after: float,
    signals: SignalFlag,
    elastic: Elastic | None = None,
) -> int:
    overrides: Mapping[str, int | float] = {}
    head = _Head(supervised)
    while True:
        full_disk = supervised.full_disk()
        if full_disk:
            print(f"error: {full_disk}", file=sys.stderr)
            return 1
        log = None
        try:
            if elastic:
                elastic.choose(_words(overrides))
            log = _new_log(supervised.folder)
            ended = _start_once(supervised, supervision, log, overrides, head, silent_after, signals, elastic)
            if isinstance(ended, int):
                return ended
            overrides = ended.overrides
            _wait(ended.wait_s, signals)
        except NoLayout as error:
            _say(supervised, f"it is not started again: {error}", ended=1)
            return 1
        except Interrupted as interrupted:
            code = _SIGNALLED + interrupted.number
            record = _end(log, code) if log else {"ended": code}
            _say(supervised, "interrupted; everything that this started has been stopped", **record)
            raise


def _start_once(
    supervised: Supervised,
    supervision: Supervision,
    log: Path,
    overrides: Mapping[str, int | float],
    head: "_Head",
    silent_after: float,
    signals: SignalFlag,
    elastic: Elastic | None,
) -> int | Again:
    """One start; the exit code where it was the last one."""
    began = Began.now(supervised.folder)
    nodes = elastic.facts() if elastic else {}
    _say(supervised, f"a start; its output is in {log}", start=log.name, overrides=dict(overrides), **nodes)
    progress = partial(read_progress, supervised.folder)
    command = supervised.command(overrides, elastic.fewer if elastic else None)
    try:
        check = elastic.check_returned if elastic else lambda: None
        code = _start(command, log, silent_after, signals, progress, check)
    except NodesReturned as returned:
        _say(supervised, f"{returned}; again from there", again_s=0, after="nodes_returned")
        return Again(0, overrides)
    if _is_worker(log):
        # Ray ends here with the head's, whose next one may answer before the launcher has looked which of them it was.
        with_heads_ray = code in (0, RAY_ENDED)
        decided_there = head.decision(_DECIDED_S if with_heads_ray else 0, signals)
        elsewhere = decided_there.get("ended")
        if elsewhere is not None:
            _say(supervised, f"the head's supervisor has ended the training with {elsewhere}", code=code)
            return int(elsewhere)
        if code == 0 or (with_heads_ray and decided_there):
            _say(supervised, "the head has ended this start, and not the training; again", code=code)
            return Again(0, overrides)
    if code == 0:
        _say(supervised, "the training came to its end", **_end(log, 0))
        return 0
    hang = None if code is not None else f"no output and no progress of any rank for {silent_after:g} s"
    attempt = supervised.attempt(code or 1, log, began, hang, elastic.current.nodes if elastic else None)
    decided = supervision.decide(attempt)
    failure = attempt.failure
    facts = {"code": code, "cause": failure.cause, "stage": failure.stage, "step": attempt.step}
    _say(supervised, f"it failed ({failure.cause}): {failure.sentence}", phase=_status(log).phase, **facts)
    if not isinstance(decided, Again):
        kept, ended = _bundle(supervised, log, began), _exit_code(code)
        # The supervisors of the run that owns the folder must not mistake this for their end.
        record = {"left": ended} if attempt.failure.cause == "in_use" else _end(log, ended)
        _say(supervised, f"it is not started again: {decided.reason}; {kept}", **record)
        return ended
    settings = " ".join(_words(decided.overrides))
    place = f"from the checkpoint of step {attempt.checkpoint}" if attempt.checkpoint else "from the beginning"
    again = {} if _is_worker(log) else {"again_s": decided.wait_s, "after": attempt.failure.cause}
    _say(supervised, f"again in {decided.wait_s:g} s {place}{' with ' + settings if settings else ''}", **again)
    return decided


def _status_file(log: Path) -> Path:
    """Where the launcher and the training of a start keep its status."""
    return log.with_suffix(".status.json")


def _status(log: Path) -> StartStatus:
    return StartStatus.read(_status_file(log))


def _is_worker(log: Path) -> bool:
    """Whether this node gives its dies to another one's training."""
    return _status(log).role == "worker"


def _end(log: Path, code: int) -> dict[str, int]:
    """What the record says of an end: that of the training, or of this node's part."""
    return {"left" if _is_worker(log) else "ended": code}


class _Head:
    """What the head's supervisor writes into the record of all nodes, from now on."""

    def __init__(self, supervised: Supervised) -> None:
        self._supervised, self._read = supervised, 0
        self._read = len(self._record())

    def decision(self, seconds: float, signals: SignalFlag) -> dict[str, Any]:
        """Its newest decision: `ended`, the exit code of the whole training, or `again_s`; empty where it has made none
        within `seconds`."""
        wait_until(lambda: bool(signals.received or self._decisions()), seconds)
        if signals.received:
            raise Interrupted(signals.received[0])
        last = self._decisions()[-1:]
        self._read = len(self._record())
        return last[0] if last else {}

    def _decisions(self) -> list[dict[str, Any]]:
        return [each for each in self._record()[self._read :] if "ended" in each or "again_s" in each]

    def _record(self) -> list[dict[str, Any]]:
        return read_entries(self._supervised.folder / SUPERVISION)


def _new_log(folder: Path) -> Path:
    """The log of a start, made: the supervisors of all nodes have one folder."""
    for number in count(1):
        with suppress(FileExistsError):
            log = folder / f"start_{number}.log"
            # Only its user reads what a training prints.
            os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return log
    raise AssertionError  # numbers do not end


class _Silent(Exception):
    """Nothing was printed and no rank made progress for so long that the training hangs as a whole."""


class Silence:
    """How long a training has shown no life: neither output nor progress of a rank.

    A training whose hang detector is off keeps no heartbeat, and its output alone counts.

    Args:
        progress: reads the run's counter, see `post_training.report.heartbeat`. What it is at first an earlier start
            may have left; only a change is life.
        clock: seconds, from any beginning.
    """

    def __init__(self, progress: Callable[[], int | None], clock: Callable[[], float]) -> None:
        self._progress, self._clock = progress, clock
        self._seen, self._alive_at, self._read_at = progress(), clock(), clock()

    def output(self) -> None:
        """The training has printed something."""
        self._alive_at = self._clock()

    def seconds(self) -> float:
        """Since the last output or progress. The file is read every `_HEARTBEAT_S` seconds: it may lie on NFS."""
        now = self._clock()
        if now - self._read_at >= _HEARTBEAT_S:
            seen, self._read_at = self._progress(), now
            if seen is not None and seen != self._seen:
                self._seen, self._alive_at = seen, now
        return now - self._alive_at


def _start(
    command: Sequence[str],
    log: Path,
    silent_after: float,
    signals: SignalFlag,
    progress: Callable[[], int | None],
    check: Callable[[], None] = lambda: None,
) -> int | None:
    """Run the command, with what it prints in the log and on the terminal; its exit status, None where it hung.

    What ``check`` raises ends it.
    """
    shown, silence = 0, Silence(progress, time.monotonic)

    def show() -> None:
        nonlocal shown
        with log.open("rb") as file:
            file.seek(shown)
            text = file.read()
        if text:
            shown += len(text)
            silence.output()
            os.write(sys.stdout.fileno(), text)
        elif silence.seconds() > silent_after and not _is_worker(log):
            raise _Silent

    try:
        return run_to_the_end(command, {STATUS_FILE: str(_status_file(log))}, Path.cwd(), log, signals, show, check)
    except _Silent:
        return None


def _wait(seconds: float, signals: SignalFlag) -> None:
    wait_until(lambda: bool(signals.received), seconds)
    if signals.received:
        raise Interrupted(signals.received[0])


def _exit_code(code: int | None) -> int:
    """A rejection, and the end that somebody asked the command for, are this command's too."""
    return code if code in (2, 129, 130, 131, 143) else 1


def _given(command: Sequence[str], key: str) -> Path | None:
    """The path that the command's own override gives to a key."""
    found = [word.partition("=")[2] for word in command if word.lstrip("+").startswith(f"{key}=")]
    return Path(found[-1].strip("'\"")) if found and found[-1] else None


def _configuration(folder: Path, began: Began) -> Mapping[str, Any]:
    """What this start resolved; empty if it did not come so far."""
    if not began.wrote(folder / CONFIGURATION):
        return {}
    try:
        return read_configuration(folder)
    except ReportError:
        return {}


def _end_of(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return file.read().decode("utf-8", errors="replace")


def _say(supervised: Supervised, sentence: str, **facts: Any) -> None:
    print(f"supervise: {sentence}", flush=True)
    entry = {"time": time.time(), "host": os.uname().nodename, **masked({"message": sentence, **facts})}
    try:
        with (supervised.folder / SUPERVISION).open("a", encoding="utf-8") as record:
            record.write(json.dumps(entry) + "\n")
    except OSError as error:
        print(f"warning: {supervised.folder / SUPERVISION} lacks the line above: {error.strerror}", file=sys.stderr)


def _bundle(supervised: Supervised, log: Path, began: Began) -> str:
    """Make one file for whoever looks into it: the last log, the configuration, metrics, faults, samples and versions.

    Secrets in all of them are masked, and nobody else can read it. What an earlier start has left lies in its folder
    `earlier`. Returns a clause that says where it is.
    """
    bundle = supervised.folder / f"failure-{datetime.now().strftime('%Y%m%d-%H%M%S')}.tar.gz"
    unfinished = bundle.with_suffix(".partial")
    versions = supervised.folder / "versions.txt"
    installed = {f"{each.metadata['Name']}=={each.version}" for each in distributions()}
    try:
        versions.write_text("\n".join(sorted(installed)) + "\n", encoding="utf-8")
        written = {log, _status_file(log), versions}
        kept = filter(Path.is_file, [*written, *(supervised.folder / name for name in _KEPT)])
        files = {("" if file in written or began.wrote(file) else "earlier/") + file.name: file for file in kept}
        write_archive(unfinished, bundle.name.removesuffix(".tar.gz"), files)
        unfinished.rename(bundle)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        return f"what is known lies in {supervised.folder}, for no archive of it could be written ({error.strerror})"
    finally:
        versions.unlink(missing_ok=True)
    return f"{bundle} holds what is known"


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
