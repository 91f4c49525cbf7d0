#!/usr/bin/env python3
r"""Compare the log-probs of rollout and training on the same tokens, and find where they first differ.

Prints the layer, the part of it, the experts and the size of the first difference.

Examples:
    python scripts/compare_log_probs.py RUN --tokens FILE
    python scripts/compare_log_probs.py RUN/checkpoints/global_step_50 \
        --tokens FILE --dtype float32
    python scripts/compare_log_probs.py RUN --tokens FILE --dump rollout FILE
    python scripts/compare_log_probs.py --rollout-dump FILE --training-dump FILE
    python scripts/compare_log_probs.py RUN --rollout-dump FILE

The third example writes one side's dump, the fourth compares two dumps on any machine, and the last compares a dump
with the other side on this machine.

A RUN is a training's folder: its configuration says how both sides are built, its newest checkpoint has the weights.
FILE of --tokens has one JSON object per line, {"prompt": ..., "response": ...}, each a text or a list of token ids.
More in docs/operations.md.

Exit codes: 0 they agree; 1 they do not; 2 rejected before anything started; 3 a side could not be computed; 130 Ctrl-C;
143 terminated.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    # Only the processes that it starts use a device; a tokenizer is a folder, and no hub is asked for it.
    os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from omegaconf import DictConfig, OmegaConf  # noqa: E402
from omegaconf.errors import OmegaConfBaseException  # noqa: E402
from rich.console import Console  # noqa: E402

from post_training.arguments import absolute  # noqa: E402
from post_training.checkpoint.durable import write_text_durably  # noqa: E402
from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.environment_files import read_environment  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.mismatch.comparison import TOLERANCES, Comparison, ComparisonError, Tolerance, compare  # noqa: E402
from post_training.mismatch.dumps import SIDES, Dump, DumpError, Side, TokenSequence, read_dump  # noqa: E402
from post_training.mismatch.report import as_json, render_page, sentence, table  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.processes.logs import last_error  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import parse_json, read_lines, read_object, read_yaml  # noqa: E402
from rehearsal.emulated_dies import remove_emulated_dies  # noqa: E402
from rehearsal.plan import run_environment  # noqa: E402
from verl_patches.features.training_checkpoint.step_folders import newest_step, step_folder  # noqa: E402
from verl_patches.trainer.isolated_ray import private_folder  # noqa: E402

JSON_NAME, PAGE_NAME = "comparison.json", "comparison.html"
_WORKER = ROOT / "scripts" / "internal" / "capture_activations.py"
_DTYPES = ("float32", "bfloat16")
_ACTOR = "actor"
_MOST_DIES = 16
_BLOCK = 128
_MIB = 1 << 20


class InvalidComparison(Exception):
    """The request is invalid, or a side could not be computed; the message is one sentence."""


@dataclass(frozen=True)
class Source:
    """The run from which both sides are built.

    Attributes:
        folder: of the run.
        config: of the run, with the overrides.
        checkpoint: of the actor; None for the weights with which the run began.
    """

    folder: Path
    config: DictConfig
    checkpoint: Path | None

    @property
    def dies(self) -> int:
        return int(self.config.trainer.nnodes) * int(self.config.trainer.n_gpus_per_node)

    @property
    def spans_nodes(self) -> bool:
        """Whether it needs more than one node; never for emulated dies."""
        return not _emulated() and int(self.config.trainer.nnodes) > 1

    @property
    def weights(self) -> str:
        """The source of the weights, for a reader."""
        return str(self.checkpoint.parent if self.checkpoint else self.config.actor_rollout_ref.model.path)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("source", nargs="?", metavar="RUN", help="a run's folder, or a checkpoint in one")
    parser.add_overrides("change the run's configuration")
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="prompts and responses, one JSON object per line")
    parser.add_argument("--limit", type=int, default=16, help="lines to read from it (default: %(default)s)")
    parser.add_argument(
        "--dtype", nargs="+", choices=_DTYPES, metavar="NAME", help="float32, bfloat16 or both (default: both)"
    )
    parser.add_argument("--rollout-dump", type=Path, metavar="FILE", help="take the rollout's side from this dump")
    parser.add_argument("--training-dump", type=Path, metavar="FILE", help="take training's side from this dump")
    parser.add_argument(
        "--dump", nargs=2, action="append", default=[], metavar=("rollout|training", "FILE"),
        help="write this side's dump; without another side to compare it with, compute only this side",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, help="relative difference of activations that counts as the same")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: outputs/mismatch/TIME)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan, and start nothing")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare both sides and return the exit code."""
    options = parse_arguments(arguments)
    try:
        given = _given_dumps(options)
        source = _source(options) if options.source else None
        wanted = _wanted(options, given, source)
        sequences = _sequences(options, given, source)
        dtypes = _dtypes(options, given)
        _check_tolerance(options.tolerance)
        output = _output(options)
    except (InvalidComparison, DumpError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        return _describe(source, wanted, sequences, dtypes, output)
    try:
        with SignalFlag() as signals:
            return _run(options, given, source, wanted, sequences, dtypes, _Place(output, signals))
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the comparison; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number
    except (InvalidComparison, DiesInUse, DumpError, ComparisonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


@dataclass(frozen=True)
class _Place:
    """The folder that it writes, and the signals that may end it."""

    output: Path
    signals: SignalFlag


def _given_dumps(options: argparse.Namespace) -> dict[Side, Dump]:
    files: dict[Side, Path | None] = {"rollout": options.rollout_dump, "training": options.training_dump}
    found = {side: read_dump(file) for side, file in files.items() if file is not None}
    for side, dump in found.items():
        if dump.header.side != side:
            raise InvalidComparison(
                f"{files[side]} is a dump of {dump.header.side}. Pass it as --{dump.header.side}-dump"
            )
    for side, _ in options.dump:
        if side not in SIDES:
            raise InvalidComparison(f"--dump={side} is invalid. Set it to {' or '.join(SIDES)}")
    return found


def _source(options: argparse.Namespace) -> Source:
    """Find the run. Raises InvalidComparison if the folder is no run or checkpoint of one, or settings do not fit."""
    folder = absolute(options.source)
    run = next((each for each in (folder, *folder.parents[:3]) if (each / "config.yaml").is_file()), None)
    if run is None:
        raise InvalidComparison(
            f"{options.source} is neither a run's folder, with config.yaml, nor a checkpoint in one"
        )
    try:
        read_yaml(run / "config.yaml")
        config = OmegaConf.load(run / "config.yaml")
        assert isinstance(config, DictConfig)
        OmegaConf.set_struct(config, True)
        config = OmegaConf.merge(config, OmegaConf.from_dotlist(options.overrides))
        assert isinstance(config, DictConfig)
        # The ranks start in the checkout, as the run's did: a relative path counts from there.
        model = config.actor_rollout_ref.model
        model.path = str(ROOT / Path(model.path).expanduser())
        source = Source(run, config, _checkpoint(folder, run))
        dies, strategy = source.dies, config.actor_rollout_ref.actor.strategy
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise InvalidComparison(
            f"{run / 'config.yaml'} with {options.overrides}: {str(error).splitlines()[0]}"
        ) from error
    if strategy != "megatron":
        raise InvalidComparison(f"actor.strategy={strategy} is invalid: only training with Megatron can be compared")
    if _emulated() and dies > _MOST_DIES:
        raise InvalidComparison(
            f"the run has {dies} dies, but at most {_MOST_DIES} are emulated here. Set a smaller layout with "
            "KEY=VALUE, or dump on the cluster (--dump) and compare the dumps"
        )
    return source


def _checkpoint(folder: Path, run: Path) -> Path | None:
    """Return the actor's folder of a named checkpoint, or of a run's newest complete one; None if it has none."""
    if folder != run and folder.name != "checkpoints":
        step = folder.parent if folder.name == _ACTOR else folder
        if not (step / _ACTOR).is_dir():
            raise InvalidComparison(f"{folder} has no checkpoint of an actor. Pass global_step_N of a run")
        return step / _ACTOR
    root = run / "checkpoints"
    number = newest_step(root)[0] if root.is_dir() else None
    return None if number is None else step_folder(root, number) / _ACTOR


def _emulated() -> bool:
    return importlib.util.find_spec("npu_emulator") is not None


def _wanted(options: argparse.Namespace, given: dict[Side, Dump], source: Source | None) -> list[Side]:
    """Return the sides that have to be computed. The rollout comes first: it receives training's weights."""
    asked = [side for side, _ in options.dump]
    compares = len(given) > 0 or not asked or set(asked) == set(SIDES)
    wanted = [side for side in SIDES if side not in given and (compares or side in asked)]
    if wanted and source is None:
        raise InvalidComparison(
            f"{' and '.join(wanted)} cannot be computed without a run. Pass a RUN, or a dump of each side"
        )
    if any(side in given for side in asked):
        raise InvalidComparison("--dump writes a side that is computed here, but this one is read from a dump")
    if not wanted and source is not None:
        raise InvalidComparison(f"both sides are dumps, so {source.folder} is not needed. Remove it")
    return wanted


def _sequences(options: argparse.Namespace, given: dict[Side, Dump], source: Source | None) -> list[TokenSequence]:
    """Return the tokens to compare. Raises InvalidComparison for a file without usable lines."""
    if given:
        if options.tokens:
            raise InvalidComparison("a dump contains its tokens. Remove --tokens")
        return list(next(iter(given.values())).sequences)
    if options.tokens is None:
        raise InvalidComparison("--tokens is missing. Set it to the file of prompts and responses to compare")
    if options.limit < 1:
        raise InvalidComparison(f"--limit={options.limit} is invalid. Set it to at least 1")
    assert source is not None
    lines = list(read_lines(options.tokens, options.limit))
    read = _Reader(Path(source.config.actor_rollout_ref.model.path), options.tokens)
    sequences = [read.line(number, line) for number, line in enumerate(lines, 1)]
    if not sequences:
        raise InvalidComparison(f"{options.tokens} has no line with a prompt and a response")
    return sequences


class _Reader:
    """Converts lines to token ids; loads the model's tokenizer at the first text."""

    def __init__(self, model: Path, file: Path) -> None:
        self._model, self._file = model, file
        self._tokenizer: Any = None
        try:
            self._vocabulary = int(read_object(model / "config.json")["vocab_size"])
        except (OSError, ValueError, KeyError) as error:
            raise InvalidComparison(
                f"{model / 'config.json'} has no vocab_size; the run's model is not there"
            ) from error

    def line(self, number: int, line: str) -> TokenSequence:
        where = f"{self._file}, line {number}"
        try:
            content = parse_json(line, where)
            prompt, response = content["prompt"], content["response"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidComparison(f'{where} is not a JSON object with "prompt" and "response"') from error
        return TokenSequence(self._tokens(prompt, where), self._tokens(response, where))

    def _tokens(self, given: Any, where: str) -> tuple[int, ...]:
        if isinstance(given, str):
            if self._tokenizer is None:
                from transformers import AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(self._model)
            given = self._tokenizer(given, add_special_tokens=False)["input_ids"]
        if not isinstance(given, list) or not given or not all(type(each) is int for each in given):
            raise InvalidComparison(f"{where}: prompt and response must be texts or lists of token ids, and not empty")
        wrong = next((each for each in given if not 0 <= each < self._vocabulary), None)
        if wrong is not None:
            raise InvalidComparison(f"{where}: {wrong} is not a token of a vocabulary of {self._vocabulary}")
        return tuple(given)


def _dtypes(options: argparse.Namespace, given: dict[Side, Dump]) -> list[str]:
    """Return the dtypes to compare in. A dump determines the dtype, in which the other side is then computed."""
    found = {dump.header.dtype for dump in given.values()}
    if not found:
        chosen = list(dict.fromkeys(options.dtype or _DTYPES))
        if options.dump and len(chosen) > 1:
            raise InvalidComparison("a dump has one dtype. Set --dtype to float32 or bfloat16")
        return chosen
    if options.dtype and set(options.dtype) != found:
        raise InvalidComparison(f"the dump is in {', '.join(sorted(found))}. Remove --dtype")
    return [next(iter(given.values())).header.dtype]


def _check_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 < tolerance < 10:
        raise InvalidComparison(
            f"--tolerance={tolerance:g} is invalid. Set it to a relative difference above 0, such as 1e-4"
        )


def _output(options: argparse.Namespace) -> Path:
    folder = options.output or ROOT / "outputs" / "mismatch" / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = absolute(folder)
    if (folder / JSON_NAME).exists():
        raise InvalidComparison(f"--output={folder} is invalid: it contains a comparison. Choose another folder")
    if not options.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _describe(
    source: Source | None,
    wanted: Sequence[Side],
    sequences: Sequence[TokenSequence],
    dtypes: Sequence[str],
    output: Path,
) -> int:
    print(f"{len(sequences)} sequences, {sum(len(each.tokens) for each in sequences)} tokens, in {', '.join(dtypes)}")
    if source is not None:
        print(f"weights: {source.weights}")
        print(f"computed on {source.dies} {'emulated dies' if _emulated() else 'dies'}: {', '.join(wanted)}")
        print(f"command: {shlex.join(_command(source, output / 'request.json'))}")
    print(f"output: {output}")
    return 0


def _run(
    options: argparse.Namespace, given: dict[Side, Dump], source: Source | None, wanted: Sequence[Side],
    sequences: Sequence[TokenSequence], dtypes: Sequence[str], place: _Place,
) -> int:  # fmt: skip
    written = {side: absolute(file) for side, file in options.dump}
    found: list[Comparison] = []
    for dtype in dtypes:
        dumps = dict(given)
        if wanted:
            assert source is not None
            files = {side: written.get(side, place.output / f"{side}.{dtype}.safetensors") for side in wanted}
            if source.spans_nodes:
                _prepare(source, dtype, sequences, files, place.output)
                continue
            _captured(source, dtype, sequences, files, place)
            dumps |= {side: read_dump(file) for side, file in files.items()}
            for side in written:
                print(f"{side} in {dtype}: {written[side]}")
        if set(dumps) == set(SIDES):
            limits = replace(TOLERANCES[dtype], relative=options.tolerance) if options.tolerance else None
            found.append(_compared(dumps, limits))
    if found:
        about = {
            "tokens": str(options.tokens or "those of the dump"),
            "weights": source.weights if source else "of the dumps",
        }
        _write(place.output, found, about)
    return 1 if any(each.first for each in found) else 0


def _compared(dumps: dict[Side, Dump], tolerance: Tolerance | None) -> Comparison:
    found = compare(dumps["rollout"], dumps["training"], tolerance)
    console = Console()
    console.print(table(found))
    print(sentence(found), flush=True)
    for name, by in found.replicas.items():
        print(f"Ranks that own the same rows differ at {name} by {by:.2g}.")
    return found


def _captured(
    source: Source, dtype: str, sequences: Sequence[TokenSequence], files: dict[Side, Path], place: _Place
) -> None:
    """Compute sides and write their dumps.

    Raises:
        DiesInUse: another job of this machine has one of the dies.
        InvalidComparison: that failed; the log is kept.
    """
    log = place.output / "logs" / f"{dtype}.log"
    print(f"{dtype}: {' and '.join(files)} on {source.dies} {'emulated ' if _emulated() else ''}dies ...", flush=True)
    with (
        claimed_dies(0 if _emulated() else source.dies),
        private_folder("mismatch", on_removal=remove_emulated_dies) as private,
    ):
        request = _requested(source, dtype, sequences, files, private)
        status = run_to_the_end(
            _command(source, request), _environment(source, dtype, private), ROOT, log, place.signals
        )
    missing = [side for side, file in files.items() if not file.is_file()]
    if status or missing:
        why = f"{signal.Signals(-status).name} ended the ranks" if status < 0 else last_error(log)
        raise InvalidComparison(f"{' and '.join(files)} in {dtype} could not be computed: {why} ({log})")


def _requested(
    source: Source, dtype: str, sequences: Sequence[TokenSequence], files: dict[Side, Path], folder: Path
) -> Path:
    """Write the request for the ranks, and the configuration that they read, into `folder`; return the request."""
    configured, request = folder / "config.yaml", folder / "request.json"
    OmegaConf.save(_configured(source, dtype, sequences), configured)
    content = {
        "config": str(configured), "checkpoint": str(source.checkpoint) if source.checkpoint else None,
        "ranks": source.dies, "about": source.weights,
        "sequences": [[each.prompt, each.response] for each in sequences],
        "outputs": {side: str(file) for side, file in files.items()},
    }  # fmt: skip
    request.write_text(json.dumps(content))
    return request


def _prepare(
    source: Source, dtype: str, sequences: Sequence[TokenSequence], files: dict[Side, Path], output: Path
) -> None:
    """Prepare a job on several nodes: print the commands to start on each of them, and the comparison after them."""
    folder = output / dtype
    folder.mkdir()
    request = _requested(source, dtype, sequences, files, folder)
    ranks = f"--nnodes={source.config.trainer.nnodes} --nproc-per-node={source.config.trainer.n_gpus_per_node}"
    program = shlex.join([str(_WORKER), str(request)])
    print(f"{dtype}: on each node, in the launcher's environment, with {output} shared by all:")
    print(f"  python -m torch.distributed.run {ranks} --rdzv-backend=c10d --rdzv-endpoint=HEAD:PORT {program}")
    print("then compare what they write: " + ", ".join(f"--{side}-dump {file}" for side, file in files.items()))


def _command(source: Source, request: Path) -> list[str]:
    worker = [str(_WORKER), str(request)]
    if _emulated():
        return [sys.executable, *worker]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={source.dies}", *worker]


def _configured(source: Source, dtype: str, sequences: Sequence[TokenSequence]) -> DictConfig:
    """Return the run's configuration with this dtype, lengths of the tokens, and no graphs, in which no hook runs."""
    config = source.config.copy()
    OmegaConf.set_struct(config, False)
    node = config.actor_rollout_ref
    prompt = max(len(each.prompt) for each in sequences)
    response = max(len(each.response) for each in sequences)
    node.overlay.precision = node.rollout.dtype = dtype
    node.overlay.measure.output_dir = ""
    node.actor.recompute_old_log_prob = True  # verl's worker would compute none for a job that leaves this forward out
    OmegaConf.update(node, "overlay.sample_handles.enabled", False)  # the tokens come from here, not from a rollout
    node.rollout.update(
        prompt_length=prompt, response_length=response, max_model_len=prompt + response, enforce_eager=True,
        log_prob_use_dynamic_bsz=False,
        max_num_batched_tokens=max(int(node.rollout.max_num_batched_tokens), prompt + response),
    )  # fmt: skip
    if OmegaConf.select(node, "rollout.engine_kwargs.vllm.additional_config.torchair_graph_config") is not None:
        node.rollout.engine_kwargs.vllm.additional_config.torchair_graph_config.enabled = False
    if _emulated():
        blocks = len(sequences) * (-(-(prompt + response) // _BLOCK) + 1) + 8
        OmegaConf.update(node, "rollout.engine_kwargs.vllm.num_gpu_blocks_override", blocks)
    OmegaConf.resolve(config)
    return config


def _environment(source: Source, dtype: str, private: Path) -> dict[str, str]:
    own = {
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    if not _emulated():
        job = read_environment(ROOT / "scripts" / "env" / "one_node.env")
        job.pop("CANN_ENV")
        return {name: os.environ.get(name, value) for name, value in job.items()} | own
    model = Path(source.config.actor_rollout_ref.model.path)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return own | run_environment([f"actor_rollout_ref.overlay.precision={dtype}"]) | {
        "NPU_EMULATOR_DEVICES": str(source.dies),
        # Every die has room for all weights, in fp32 with gradients and moments.
        "NPU_EMULATOR_CAPACITY_MB": str(2048 + 16 * weights // _MIB),
        "NPU_EMULATOR_NODE": private.name,
        "TMPDIR": str(private),
    }  # fmt: skip


def _write(output: Path, found: Sequence[Comparison], about: dict[str, str]) -> None:
    """Write the page, and last the JSON, which marks the comparison as done."""
    content = json.dumps(about | {"comparisons": [as_json(each) for each in found]}, indent=1, allow_nan=True) + "\n"
    for name, text in ((PAGE_NAME, render_page(found, about)), (JSON_NAME, content)):
        write_text_durably(output / name, text)
    print(f"the page: {output / PAGE_NAME}")


if __name__ == "__main__":
    escape_output(standard_output=False)
    with masked_output():
        sys.exit(main())
