#!/usr/bin/env python3
r"""Prove that a configuration resumes bit for bit.

Trains it, scaled down to at most 8 emulated dies, kills it at random points, resumes it, and compares every metric of
every step and all weights with an uninterrupted run.

Example, the job with true weights:
    python scripts/prove_resume.py --points 4 \
        --config-name deepseek_v3_256die_true_weight

A configuration of more dies gets its `+scale=emulated_...`, one of a single node what `--emulate` gives it. The model
is the rehearsal's tiny one of the family, for a scaled-down job with the widths that DeepSeek-V3's attention kernels
take, or with the layers that its stages need.

Run the same command with the same --output to resume an interrupted proof: points that were equal are kept.

Exit codes: 0 everything is equal; 1 something differs or a run failed; 2 the configuration is rejected; 130 Ctrl-C;
143 terminated.
"""

import argparse
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import absolute, finite  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.models.families import families  # noqa: E402
from post_training.overrides import setting  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag  # noqa: E402
from post_training.run_lock import FolderInUse, FolderLock, owning  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from rehearsal.image_task import write_image_task  # noqa: E402
from rehearsal.jobs import DEFAULT_JOB, JOBS, Job, scale_of  # noqa: E402
from rehearsal.plan import DEFAULT_TEST_DATA, DEFAULT_TRAIN_DATA, Options, make_plan  # noqa: E402
from rehearsal.resume_proof.comparison import Comparison, compare, digests_of  # noqa: E402
from rehearsal.resume_proof.points import DRIVER_PLACES, WORKER_PLACES, Point, draw_points  # noqa: E402
from rehearsal.resume_proof.record import ProofRecord, Row  # noqa: E402
from rehearsal.resume_proof.runs import (  # noqa: E402
    BATCH,
    MOST_DIES,
    STEPS,
    ProofError,
    Shrunk,
    train_killed,
    train_unbroken,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SHOWN, _TRAIN = 3, "train.parquet"
# As in the job of one node, a step has two updates, in micro batches that divide the proof's small ones.
_ONE_NODE = (
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
)


def main(arguments: list[str] | None = None) -> int:
    """Run the proof and return the exit code."""
    options = _options(arguments)
    folder = absolute(options.output or ROOT / "outputs" / "prove_resume" / datetime.now().strftime("%Y%m%d-%H%M%S"))
    try:
        FolderLock(folder, "proof").check_free()
        shrunk = _shrunk(options, folder)
    except (FolderInUse, ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    points = draw_points(options.points, options.seed, shrunk.dies, STEPS, (*WORKER_PLACES, *DRIVER_PLACES))
    print(
        f"{options.config_name} on {shrunk.dies} emulated dies, {STEPS} steps, {len(points)} kills; files in {folder}"
    )
    try:
        with SignalFlag() as signals, owning([folder], "proof"):
            return _prove(shrunk, points, signals)
    except FolderInUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ProofError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the proof; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--config-name", required=True, metavar="NAME", help="a file of verl_patches/trainer/config")
    parser.add_argument("--points", type=int, default=4, help="number of kills (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random points (default: %(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a tiny model's folder instead of the rehearsal's")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write, or to resume")
    parser.add_argument(
        "--run-limit", type=finite(), default=900.0, metavar="SECONDS", help="limit of one run (default: 900)"
    )
    parser.add_overrides("Hydra overrides, as for the training")
    options = parser.parse_intermixed_args(arguments)
    if options.points < 1:
        parser.error(f"--points={options.points} is invalid. Set it to at least 1")
    return options


def _shrunk(options: argparse.Namespace, folder: Path) -> Shrunk:
    """Return the scaled-down configuration, after the checks of a training, and make its model and data.

    Raises ValueError if it is rejected, or stays too large.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_patches.trainer.configuration_checks import check_configuration
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.main_ppo import compose

    job = JOBS.get(options.config_name, JOBS[DEFAULT_JOB])
    tiny = make_plan(Options(job=job.configuration), "proof")
    scale = scale_of(options.config_name)
    scaled = tiny.checkpoint.with_name(f"of_scaled_{scale.model_type}")
    own = _of_a_proof(folder / "data", job)

    def given(model: Path, *scale: str) -> list[str]:
        path = setting("actor_rollout_ref.model.path", absolute(options.model) if options.model else model)
        return [*scale, *own, path, *options.overrides]

    overrides = given(tiny.checkpoint)
    try:
        config = compose(options.config_name, overrides)
        if config.trainer.nnodes * config.trainer.n_gpus_per_node > MOST_DIES:
            overrides = given(scaled, scale.setting)
            config = compose(options.config_name, overrides)
        check_configuration(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(sentence_of(error)) from error
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if dies > MOST_DIES:
        raise ValueError(f"{dies} dies are too many for a proof. Set trainer.nnodes and n_gpus_per_node to at most 8")
    problems = _problems(config)
    if options.model is None:
        scaled_command = [sys.executable, "-m", "rehearsal.resume_proof.model", str(scaled), scale.model_type]
        _make_model(scaled_command if scale.setting in overrides else tiny.checkpoint_command())
    of_model = scale.model_type if scale.setting in overrides else job.model_type
    if next(each for each in families() if of_model in each.model_types).reads_images:
        _draw_data(folder / "data", len(problems))
    else:
        _make_data(folder / "data", problems)
    return Shrunk(options.config_name, tuple(overrides), dies, folder, options.run_limit)


def _make_model(command: list[str]) -> None:
    """Run the command that makes a tiny model, or keeps an existing one."""
    print("the tiny model ...", flush=True)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def _of_a_proof(data: Path, job: Job) -> list[str]:
    of_its_job = [*job.settings, *_ONE_NODE, f"trainer.n_gpus_per_node={job.dies}"] if job.settings else []
    return [
        *of_its_job,
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=1000",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[console]",
        "ray_init.address=local",
        "actor_rollout_ref.overlay.checkpoint.keep_last=0",
        "actor_rollout_ref.overlay.watch.enabled=true",
        f"data.train_batch_size={BATCH}",
        setting("data.train_files", [data / _TRAIN]),
        setting("data.val_files", [data / "test.parquet"]),
    ]


def _problems(config: "DictConfig") -> list[str]:
    """Return the problems of two batches, so that the last step is in the second epoch.

    Raises ValueError if there are not enough problems.
    """
    known = DEFAULT_TRAIN_DATA.read_text().splitlines()
    batches = {key: config.data.get(key) or 0 for key in ("train_batch_size", "gen_batch_size")}
    key = max(batches, key=lambda name: batches[name])
    if 2 * batches[key] > len(known):
        raise ValueError(
            f"data.{key}={batches[key]} is invalid: a proof takes two batches and has {len(known)} problems. Set it to "
            f"at most {len(known) // 2}, or remove it"
        )
    return known[: 2 * batches[key]]


def _make_data(folder: Path, problems: list[str]) -> None:
    """Write the problems as parquet, unless the files already have them."""
    few, text = folder / "few.jsonl", "\n".join(problems) + "\n"
    if (folder / _TRAIN).is_file() and few.read_text() == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _TRAIN).unlink(missing_ok=True)
    few.write_text(text)
    tool = [sys.executable, str(ROOT / "scripts" / "json_to_parquet.py"), "--output_dir", str(folder)]
    tool += ["--json_path", str(few), "--test_json_path", str(DEFAULT_TEST_DATA)]
    tool += ["--data_source", DEFAULT_TRAIN_DATA.parent.name]
    subprocess.run(tool, check=True, stdout=subprocess.DEVNULL)


def _draw_data(folder: Path, rows: int) -> None:
    """Write `rows` questions about drawn images as parquet, unless the file already has as many."""
    import pyarrow.parquet

    if not (folder / _TRAIN).is_file() or pyarrow.parquet.read_metadata(folder / _TRAIN).num_rows != rows:
        write_image_task(folder, 0, rows)


def _prove(shrunk: Shrunk, points: list[Point], signals: SignalFlag) -> int:
    begun = time.monotonic()
    unbroken = train_unbroken(shrunk, signals)
    print(f"unbroken run: {time.monotonic() - begun:.0f} s", flush=True)
    if digests_of(unbroken, STEPS) == digests_of(unbroken, STEPS - 1):
        print("error: the last step changed nothing, so a resume proves nothing. Raise the learning rate")
        return 1
    record = ProofRecord(shrunk.folder / "proof.json", shrunk.asked)
    rows = []
    for number, point in enumerate(points, start=1):
        print(f"{number}/{len(points)}  {point}", flush=True)
        begun = time.monotonic()
        row = record.equal(point) or _prove_one(shrunk, unbroken, point, signals)
        record.add(row)
        rows.append(row)
        print(f"     continued after step {row.after}; {row.metrics} metrics of {row.steps} steps, "
f"{len(row.differing)} differ; {time.monotonic() - begun:.0f} s", flush=True)  # fmt: skip
    _print_table(rows)
    return int(any(row.differing for row in rows))


def _prove_one(shrunk: Shrunk, unbroken: Path, point: Point, signals: SignalFlag) -> Row:
    """Kill a run at a point, resume it, and compare; its files are kept if something differs or cannot be compared."""
    folder = shrunk.folder / f"point-{time.time_ns()}"
    try:
        after = train_killed(shrunk, folder.name, point, signals)
        result = compare(unbroken, folder, STEPS)
    except (ProofError, ValueError) as error:
        after, result = -1, Comparison(0, 0, (str(error),))
    if not result.differing:
        shutil.rmtree(folder)
    return Row(str(point), after, result.steps, result.metrics, result.differing)


def _print_table(rows: list[Row]) -> None:
    places = [row.point.partition(" while ")[2] for row in rows]
    width = max(map(len, places), default=0) + 2
    print(f"\n{'killed':<9}{'at':<{width}}{'went on after':<15}{'metrics':>8}  what differed")
    for row, at in zip(rows, places, strict=True):
        shown = "; ".join(row.differing[:_SHOWN]) or "nothing"
        more = f" and {len(row.differing) - _SHOWN} more" if len(row.differing) > _SHOWN else ""
        killed = row.point.partition(" while ")[0]
        print(f"{killed:<9}{at:<{width}}{'step ' + str(row.after):<15}{row.metrics:>8}  {shown}{more}")
    failed = sum(bool(row.differing) for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} resumes equalled the unbroken run, bit for bit")


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
