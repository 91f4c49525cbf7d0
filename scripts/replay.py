#!/usr/bin/env python3
r"""Replay a recorded training step of the stack 2026, and report what differs
and from which stage on.

Examples:
    python scripts/replay.py RUN/checkpoints/records/step_3 --emulate
    python scripts/replay.py RUN/checkpoints/records/step_3 --emulate --dies 1 \
        --set actor_rollout_ref.actor.megatron.expert_model_parallel_size=1

A run writes that folder for each step that trainer.record_steps names. Log-probs of the reference and of the weights
before the step, advantages and the update are computed from the recorded samples, on as many dies as are asked for,
and compared with the record. With --layers the first operator is named whose result is not finite although all its
inputs are. Prints the table, and writes replay.json with --output. More in docs/replay.md.

Exit codes: 0 all is as recorded; 1 something differs, or the step could not be made; 2 rejected before anything
started; 130 Ctrl-C; 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # only the ranks use a device

from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.environment_files import read_environment  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.overrides import setting, with_absolute_path  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.report.run_folder import at  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from rehearsal.emulated_dies import remove_emulated_dies  # noqa: E402
from rehearsal.stack_2026.plan import ENVIRONMENT_FILE  # noqa: E402
from scripts.inference.models import InferenceError, check_machine  # noqa: E402
from verl_plugin.step_record.comparison import HEADER, STAGES, Compared  # noqa: E402
from verl_plugin.step_record.folder import RecordedStep, RecordError, read_record  # noqa: E402
from verl_plugin.trainer_modes import MODULES_KEY  # noqa: E402

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}
_WORKER = "verl_plugin.step_record.worker"
_MODEL = "actor_rollout_ref.model.path"
# If this is set, verl asks Ray for the device of a rank, and there is no Ray here.
_NOSET_DEVICES = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
# Memory of weights, gradients, moments and a reference in float32, as a multiple of files in 16 bits; and MiB for CANN
# and activations.
_TIMES_FILES, _BESIDE_MIB = 12, 1024
_LAST_LINES = 12


class ReplayError(ValueError):
    """The request is invalid, or the step could not be replayed; the message is one sentence."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a recorded step: RUN/checkpoints/records/step_N")
    parser.add_argument("--dies", type=int, metavar="N", help="dies to compute on (default: as many as trained)")
    parser.add_argument("--until", choices=STAGES, default=STAGES[-1], help="the last stage (default: %(default)s)")
    parser.add_argument("--layers", action="store_true", help="find the first value that is not finite; takes longer")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest accepted difference, relative for metrics above 1 (default: 1e-5 in float32, 0.1 in bfloat16)",
    )
    parser.add_argument(
        "--set",
        action="append",
        type=with_absolute_path,
        default=[],
        metavar="KEY=VALUE",
        help="change the recorded configuration; repeat",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the comparison as JSON")
    parser.add_argument("--emulate", action="store_true", help="run on the emulated NPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the step and return the exit code."""
    options = parse_arguments(arguments)
    try:
        record, _ = read_record(options.folder)
        dies = record.dies if options.dies is None else options.dies
        _check(options, record, dies)
        check_machine(options.emulate, dies, "2026")
    except (RecordError, ReplayError, InferenceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    on = f"{record.dies} {'die' if record.dies == 1 else 'dies'}"
    print(f"Recomputing step {record.step} of {len(record.keys)} samples, recorded on {on}, on {dies}", flush=True)
    try:
        with SignalFlag() as signals, claimed_dies(0 if options.emulate else dies):
            found = _made(options, record, dies, signals)
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the replay; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number
    except DiesInUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ReplayError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return _report(found, options.layers)


def _check(options: argparse.Namespace, record: RecordedStep, dies: int) -> None:
    """Raise ReplayError for input that would make every rank fail after its start."""
    if not 1 <= dies <= 1024:
        raise ReplayError(f"--dies={dies} is invalid. Set it to a number from 1 to 1024")
    if options.tolerance is not None and not (options.tolerance >= 0 and math.isfinite(options.tolerance)):
        raise ReplayError(f"--tolerance={options.tolerance:g} is invalid. Set it to a number, at least 0")
    for given in options.set:
        key, separator, _ = given.partition("=")
        if not separator or "." not in key:
            raise ReplayError(
                f"--set={given} is invalid: not KEY=VALUE. Set it like actor_rollout_ref.actor.strategy=fsdp2"
            )
    model = _model(options, record)
    if not (model / "config.json").is_file():
        raise ReplayError(
            f"{model}, the model of the recorded run, is not on this machine. Pass its folder with --set {_MODEL}=DIR"
        )
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ReplayError(f"--output={options.output} is invalid: no folder {options.output.absolute().parent}")


def _model(options: argparse.Namespace, record: RecordedStep) -> Path:
    """Return the model's folder; a relative one of the record counts from the checkout, where launchers start runs."""
    given = [each.partition("=")[2].strip("'\"") for each in options.set if each.startswith(f"{_MODEL}=")]
    return ROOT / (given[-1] if given else str(at(record.config, _MODEL)))


def _made(options: argparse.Namespace, record: RecordedStep, dies: int, signals: SignalFlag) -> dict[str, Any]:
    """Start the ranks and return their comparison."""
    with tempfile.TemporaryDirectory(prefix="replay-") as temporary:
        folder = Path(temporary)
        result, log = folder / "replay.json", folder / "ranks.log"
        environment = _environment(options, record, dies, folder)
        try:
            code = run_to_the_end(_command(options, record, dies, result), environment, folder, log, signals)
        finally:
            if options.emulate:
                remove_emulated_dies(folder.name)
        if code or not result.is_file():
            print("".join(log.read_text(errors="replace").splitlines(True)[-_LAST_LINES:]), file=sys.stderr, end="")
            said = [each.read_text() for each in sorted(folder.glob("*.error"))] or ["see their last lines above"]
            raise ReplayError(f"the ranks ended with exit code {code}: {said[0]}")
        return json.loads(result.read_text())


def _command(options: argparse.Namespace, record: RecordedStep, dies: int, result: Path) -> list[str]:
    tolerance = options.tolerance
    if tolerance is None:
        rollout = str(at(record.config, "actor_rollout_ref.rollout.dtype"))
        tolerance = TOLERANCES.get(rollout, TOLERANCES["bfloat16"])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(dies)]
    command += ["-m", _WORKER, str(options.folder.absolute()), str(result), "--until", options.until]
    command += ["--tolerance", repr(tolerance), *(["--layers"] if options.layers else [])]
    model = _model(options, record)
    # The ranks start in another folder.
    own = [] if str(model) == str(at(record.config, _MODEL)) else [setting(_MODEL, model)]
    return [*command, *(word for given in (*own, *options.set) for word in ("--set", given))]


def _environment(options: argparse.Namespace, record: RecordedStep, dies: int, folder: Path) -> Mapping[str, str]:
    """Return the environment variables of a rank."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    own |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # Megatron asserts it
    own[_NOSET_DEVICES] = ""
    modules = at(record.config, MODULES_KEY)
    if modules:
        own["VERL_USE_EXTERNAL_MODULES"] = str(modules)
    if not options.emulate:
        return own
    weights = sum(file.stat().st_size for file in _model(options, record).glob("*.safetensors"))
    return read_environment(ENVIRONMENT_FILE) | own | {
        "NPU_EMULATOR_DEVICES": str(dies),
        "NPU_EMULATOR_CAPACITY_MB": str(_BESIDE_MIB + (_TIMES_FILES * weights >> 20)),
        "NPU_EMULATOR_NODE": folder.name,
        "ASCEND_VISIBLE_DEVICES": ",".join(map(str, range(dies))),
    }  # fmt: skip


def _report(found: Mapping[str, Any], layers: bool) -> int:
    """Print the comparison and return the exit code."""
    compared = [Compared(**each) for each in found["compared"]]
    print("\n".join([HEADER, *(each.line() for each in compared)]))
    for stage, sentences in found["origins"].items():
        for sentence in sentences:
            print(f"  {stage}: the first value that is not finite came from {sentence}")
    if layers and not found["origins"]:
        print("  no operator made a value that is not finite")
    wrong = next((each for each in compared if each.apart), None)
    if wrong is None:
        print("Everything is as recorded." if not found["origins"] else "As recorded, with values that are not finite.")
        return 1 if found["origins"] else 0
    print(f"The first stage that differs is {wrong.stage}: {wrong.what}, {wrong.where}.")
    return 1


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
