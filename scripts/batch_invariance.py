#!/usr/bin/env python3
r"""Find the operators that make log-probs depend on what else is in vLLM's batch.

Example:
    python scripts/batch_invariance.py --emulate

One sample is generated alone, first and last of eight, with its prompt in
chunks, with the prompt's beginning from the cache, and in graphs of other
sizes: by stack 2026's vLLM-Ascend as it is, and in the batch-invariant mode.
Log-probs are compared bit for bit with those of the sample alone. Without
graphs each operator is checked: the first one whose result differs for a token
of the sample is named, then computed one row at a time, and the search for the
next one continues. More in docs/batch-invariance.md.

Exit codes: 0 no log-prob differs in the batch-invariant mode; 1 some do, or an
engine failed; 2 rejected before anything started; 130 Ctrl-C; 143 terminated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # only the engines use a device

from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.environment_files import read_environment  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from rehearsal.emulated_dies import remove_emulated_dies  # noqa: E402
from rehearsal.plan import CHECKPOINT_SEED, DEFAULT_TRAIN_DATA  # noqa: E402
from rehearsal.stack_2026.plan import ENVIRONMENT_FILE  # noqa: E402
from scripts.inference.models import InferenceError, check_machine  # noqa: E402
from verl_plugin.batch_invariance.cache import make_cache  # noqa: E402
from verl_plugin.batch_invariance.checks import VARIABLE  # noqa: E402
from verl_plugin.batch_invariance.jobs import Job  # noqa: E402
from verl_plugin.batch_invariance.report import differs, table  # noqa: E402
from verl_plugin.rollout import WORKER  # noqa: E402

_WORKER = "verl_plugin.batch_invariance.worker"
_LAST_LINES = 12
_MIB = 1 << 20
# A decode step of one sample runs in a graph for one token, or in one that is padded to 16.
MODES = {"both": ("off", "on"), "all": ("off", "upstream", "on")}
FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
GRAPHS = {"small graphs": (1, 2, 4, 8), "graphs of 16": (16,)}


class EngineError(ValueError):
    """An engine failed, or an option is invalid; the message is one sentence."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, metavar="DIR", help="HuggingFace folder (default: a tiny model)")
    model.add_argument("--family", choices=FAMILIES, default="qwen3", help="of the tiny model (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the engine (default: %(default)s)"
    )
    parser.add_argument(
        "--mode",
        choices=("both", "all", "off", "upstream", "on"),
        default="both",
        help="upstream: on, without this project's worker (default: %(default)s)",
    )
    parser.add_argument(
        "--engines",
        type=int,
        choices=(1, 2),
        default=1,
        help="2: data-parallel engines that share the experts of a mixture, each on an NPU of its own (default: "
        "%(default)s)",
    )
    parser.add_argument("--no-graphs", action="store_true", help="skip graphs, which take a minute to capture")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--emulate", action="store_true", help="run on the emulated NPU")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all engines and return the exit code."""
    options = parse_arguments(arguments)
    try:
        _check(options)
        check_machine(options.emulate, options.engines, "2026")
    except (EngineError, InferenceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        with SignalFlag() as signals, claimed_dies(0 if options.emulate else options.engines):
            found = _found(options, signals)
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the search; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number
    except DiesInUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (EngineError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))
    return int("on" in found and differs(found["on"]))


def _check(options: argparse.Namespace) -> None:
    if options.model is not None and not (options.model / "config.json").is_file():
        raise EngineError(f"--model={options.model} is invalid: no config.json. Set it to a model's folder")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise EngineError(f"--output={options.output} is invalid: no folder {options.output.absolute().parent}")


def _found(options: argparse.Namespace, signals: SignalFlag) -> dict[str, Any]:
    """Return the engines' results by mode: that of the engine without graphs, with those of the others in `graphs`."""
    with tempfile.TemporaryDirectory(prefix="batch-invariance-") as temporary:
        folder = Path(temporary)
        model = _tiny_model(folder / "model", options.family) if options.model is None else options.model.absolute()
        found: dict[str, Any] = {}
        for mode in MODES.get(options.mode, (options.mode,)):
            results = {
                name: _run(options, mode, name, job, folder, signals)
                for name, job in _jobs(model, options, WORKER if mode == "on" else "")
            }
            found[mode] = results.pop("no graphs")
            found[mode]["graphs"] = results
    return found


def _tiny_model(folder: Path, family: str) -> Path:
    """Write a tiny random model, as in the rehearsal."""
    from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint

    request = CheckpointRequest(DEFAULT_TRAIN_DATA, CHECKPOINT_SEED, "float32", None, family)
    make_checkpoint(request, folder, lambda step, loss: None)
    return folder


def _jobs(model: Path, options: argparse.Namespace, worker: str) -> Iterator[tuple[str, Job]]:
    job = Job(str(model), options.dtype, worker=worker, engines=options.engines)
    yield "no graphs", job
    for name, sizes in () if options.no_graphs else GRAPHS.items():
        yield name, dataclasses.replace(job, graph="PIECEWISE", sizes=sizes, search=False)


def _run(
    options: argparse.Namespace, mode: str, name: str, job: Job, folder: Path, signals: SignalFlag
) -> dict[str, Any]:
    """Start one engine and return its result."""
    print(f"Batch-invariant mode {mode}, {name}", flush=True)
    here = folder / f"{mode}-{name.replace(' ', '-')}"
    here.mkdir()
    (here / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    command = [sys.executable, "-W", "ignore", "-m", _WORKER, str(here / "job.json"), str(here / "result.json")]
    try:
        code = run_to_the_end(command, _environment(options, mode, job, here), here, here / "engine.log", signals)
    finally:
        for node in _nodes(here, job.engines) if options.emulate else ():
            remove_emulated_dies(node)
    if code or not (here / "result.json").is_file():
        lines = (here / "engine.log").read_text(errors="replace").splitlines(True)
        print("".join(lines[-_LAST_LINES:]), file=sys.stderr, end="")
        raise EngineError(f"the engine ended with exit code {code} (see its last lines above)")
    return dict(json.loads((here / "result.json").read_text()))


def _nodes(here: Path, engines: int) -> list[str]:
    """Return the names of the emulated nodes of a job: each engine has one."""
    node = f"{here.parent.name}-{here.name}"
    return [node] if engines == 1 else [f"{node}.{number}" for number in range(engines)]


def _environment(options: argparse.Namespace, mode: str, job: Job, here: Path) -> Mapping[str, str]:
    """Return the environment variables of an engine, which runs in the process of its caller."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    own = {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_CACHE_ROOT": str(make_cache(here / "compiled")),
        VARIABLE: "0" if mode == "off" else "1",
    }
    if not options.emulate:
        return own
    emulated = read_environment(ENVIRONMENT_FILE) | own
    # The parts of a model for graphs are found by tracing it.
    emulated["TORCHDYNAMO_DISABLE"] = "1" if job.graph == "eager" else "0"
    weights = sum(file.stat().st_size for file in Path(job.model).glob("*.safetensors"))
    return emulated | {
        "NPU_EMULATOR_DEVICES": "1",
        "NPU_EMULATOR_CAPACITY_MB": str(1024 + 3 * weights // _MIB),
        "NPU_EMULATOR_NODE": f"{here.parent.name}-{here.name}",
    }


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
