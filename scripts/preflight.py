#!/usr/bin/env python3
r"""Check a job before it asks for an NPU.

Runs every check of a start, the plan of memory and disks, the checks of this node against the cluster's file, a test of
two of its dies, and the job itself on at most 8 emulated dies: train, kill, resume, validate, export, evaluate. With
--stack 2026 it also prints the metrics of the first step, and the evaluation's score has to be the validation's.

Examples, on any machine; the training gets the same overrides:
    python scripts/preflight.py --cluster FILE \
        --config-name deepseek_v3_256die_true_weight
    python scripts/preflight.py --config-name qwen2_5_0_5b_gsm8k \
        --no-scaled-down-job \
        actor_rollout_ref.model.path=MODEL
    python scripts/preflight.py --stack 2026 --cluster FILE \
        --config-name deepseek_v3_671b_256_dies

Prints the stages, and writes them to preflight.html in the output folder. The emulated run starts once every other
stage has passed.

Exit codes: 0 all checks pass; 1 one fails; 2 arguments rejected; 130 Ctrl-C; 143 terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import absolute  # noqa: E402
from post_training.checkpoint.durable import write_text_durably  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.masking import masked_output, masked_text  # noqa: E402
from post_training.models.families import families  # noqa: E402
from post_training.overrides import setting  # noqa: E402
from post_training.plan.fsdp_report import FsdpPlan  # noqa: E402
from post_training.plan.report import JobPlan, Machine  # noqa: E402
from post_training.plan.verl_0_9_jobs import make_verl_0_9_plan  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.processes.logs import last_error  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from rehearsal.jobs import JOBS, scale_of  # noqa: E402
from rehearsal.scaled_down_job import ScaledDownJob, TrainedJob  # noqa: E402
from rehearsal.stack_2026.jobs import JOBS as JOBS_2026  # noqa: E402
from rehearsal.stack_2026.scaled_down_job import ScaledDownJob2026  # noqa: E402
from scripts import doctor  # noqa: E402
from scripts.health_checks.device_test import check_device  # noqa: E402
from scripts.plan import CANN_MEMORY, configuration_of, die_bytes, make_plan, outside_torch, read_model  # noqa: E402
from verl_patches.trainer import main_ppo  # noqa: E402
from verl_plugin.jobs import __main__ as jobs_2026  # noqa: E402
from verl_plugin.jobs import check_job, compose_job  # noqa: E402

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
_MODEL, _CHECKPOINTS = "actor_rollout_ref.model.path", "trainer.default_local_dir"
_SIGNALLED = 128
_SAME_SCORE = 1e-6  # means of the same scores, summed in other orders


@dataclass(frozen=True)
class Stage:
    """The result of one stage.

    Attributes:
        about: describes the stage.
        state: passed, failed or left out.
        said: why it failed or was left out, or its output.
    """

    name: str
    about: str
    state: str
    said: str
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages and return the exit code."""
    options = _options(arguments)
    try:
        cluster = doctor.read_settings(options.cluster) if options.cluster else {}
        options.die = die_bytes(options.die_memory, _cluster_file(options))
        options.chip = cluster.get("CHIP")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given = [*_of_cluster(cluster), *options.overrides]
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        with SignalFlag() as signals:
            stages = _stages(options, given, signals)
    except OSError as error:
        print(f"error: --output={options.output} is invalid: {error.strerror}. Choose another folder", file=sys.stderr)
        return 2
    except Interrupted as interrupted:
        print("interrupted; all processes have been stopped", file=sys.stderr)
        return _SIGNALLED + interrupted.number
    passed = all(stage.state != FAILED for stage in stages)
    _write_page(options, stages, passed)
    print(f"{'all checks passed' if passed else 'not fit to start'}; {options.output}/preflight.html")
    return 0 if passed else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    names = "a file of verl_patches/trainer/config, or of verl_plugin/config"
    parser.add_argument("--config-name", required=True, metavar="NAME", help=names)
    stack = "versions of upstream: docs/stacks.md (default: %(default)s)"
    parser.add_argument("--stack", choices=sorted(doctor.CLUSTERS), default="2025", metavar="NAME", help=stack)
    cluster = "settings of the cluster: sets model, data and nodes, and checks this node"
    parser.add_argument("--cluster", type=Path, metavar="FILE", help=cluster)
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="a config.json for the plan instead of the model's own"
    )
    parser.add_argument(
        "--die-memory",
        metavar="SIZE",
        help="usable memory of a die (default: DIE_MEMORY of the cluster's file, or 61GiB)",
    )
    parser.add_argument("--swap-optimizer", action="store_true", help="MindSpeed keeps the optimizer on the host")
    parser.add_argument("--no-scaled-down-job", action="store_true", help="skip the emulated run, which takes minutes")
    # The option's name in earlier releases; CHANGELOG.md says until when.
    parser.add_argument("--no-twin", action="store_true", dest="no_scaled_down_job", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: outputs/preflight/TIME)")
    parser.add_argument("--dry-run", action="store_true", help="print the emulated run's command, and skip it")
    parser.add_overrides("Hydra overrides, as for the training")
    options = parser.parse_intermixed_args(arguments)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    options.output = absolute(options.output or ROOT / "outputs" / "preflight" / name)
    return options


def _of_cluster(cluster: dict[str, str]) -> list[str]:
    """Return the overrides that the launcher adds from the cluster's file."""
    if not cluster:
        return []
    return [
        f"trainer.nnodes={cluster['NODES']}",
        f"trainer.n_gpus_per_node={cluster['DIES_PER_NODE']}",
        setting(_MODEL, Path(cluster["MODEL_PATH"])),
        setting("data.train_files", [Path(cluster["TRAIN_FILES"])]),
        setting("data.val_files", [Path(cluster["TEST_FILES"])]),
        setting(_CHECKPOINTS, Path(cluster["OUTPUT_DIR"]) / "checkpoints"),
    ]


def _cluster_file(options: argparse.Namespace) -> Path:
    """Return the cluster's file, or the default one of the stack if none is given."""
    given: Path | None = options.cluster
    return given or ROOT / "scripts" / "env" / doctor.CLUSTERS[options.stack]


# A stage: its name, its description, and the function that runs it.
_Look = tuple[str, str, Callable[[], tuple[str, str]]]


def _stages(options: argparse.Namespace, given: list[str], signals: SignalFlag) -> list[Stage]:
    cheap: list[_Look] = [
        ("checks", "keys, types, sizes, layout, data, reward, trackers, disk space, as at a start",
         lambda: _checks(options, given)),
        ("plan", "memory of a die by phase, of hosts, and checkpoints against free space",
         lambda: _plan(options, given)),
        ("node", "this node against the cluster's file, as in doctor.py", lambda: _node(options)),
        ("device", "dies 0 and 1: NaN, large tensors, events and all-to-all, as in doctor.py", _device),
    ]  # fmt: skip
    emulation = _emulation_2026 if options.stack == "2026" else _emulation
    command, emulated = emulation(options, given, signals)
    stages: list[Stage] = []
    for name, about, look in (*cheap, *emulated):
        begun = time.monotonic()
        why_not = "" if len(stages) < len(cheap) else _why_not(options, command, stages)
        if name == "evaluation" and not why_not and _reads_images(options):
            why_not = "evaluate.py does not support images"
        state, said = (LEFT_OUT, why_not) if why_not else look()
        stages.append(_shown(Stage(name, about, state, said, time.monotonic() - begun)))
    return stages


def _emulation(options: argparse.Namespace, given: list[str], signals: SignalFlag) -> tuple[list[str], list[_Look]]:
    """Return the command of the scaled-down job, and its stages."""
    scaled = ScaledDownJob.of_job(options.config_name, given, options.output / "scaled_down_job")

    def ends_well(name: str, command: Callable[[], list[str]]) -> Callable[[], tuple[str, str]]:
        return lambda: _run(command(), options.output / f"{name}.log", signals)

    return scaled.proof(), [
        ("scaled_down_job", "the job on at most 8 emulated dies: trained, killed, continued, and compared bit for bit",
         ends_well("scaled_down_job", scaled.proof)),
        ("validation", "metrics of the scaled-down job's validation after its last step",
         lambda: _validation(scaled, scaled.run / "run.log")),
        ("export", "the scaled-down job's last checkpoint as a HuggingFace folder", ends_well("export", scaled.export)),
        ("evaluation", "answers of the export, judged by the job's reward", ends_well("evaluation", scaled.evaluation)),
    ]  # fmt: skip


def _emulation_2026(
    options: argparse.Namespace, given: list[str], signals: SignalFlag
) -> tuple[list[str], list[_Look]]:
    """Return the same for the stack 2026."""
    scaled = ScaledDownJob2026.of_job(options.config_name, given, options.output / "scaled_down_job")
    return scaled.proof(), [
        ("scaled_down_job", "the job on emulated dies: trained, killed, continued, and compared bit for bit",
         lambda: _run(scaled.proof(), options.output / "scaled_down_job.log", signals)),
        ("first_step", "metrics of the scaled-down job's first step, to compare the cluster's with",
         lambda: _first_step(scaled)),
        ("validation", "metrics of the scaled-down job's validation after its last step",
         lambda: _validation(scaled, scaled.run)),
        ("export", "the scaled-down job's last checkpoint as a HuggingFace folder",
         lambda: _run(scaled.export(), options.output / "export.log", signals)),
        ("evaluation", "greedy answers of the export have the validation's score",
         lambda: _same_score(scaled, _run(scaled.evaluation(), options.output / "evaluation.log", signals))),
    ]  # fmt: skip


def _reads_images(options: argparse.Namespace) -> bool:
    """Return whether the scaled-down job's model reads images."""
    if options.stack == "2026":
        model_type = JOBS_2026[options.config_name].model
    else:
        job = JOBS.get(options.config_name)
        model_type = job.model_type if job else scale_of(options.config_name).model_type
    return any(family.reads_images for family in families() if model_type in family.model_types)


def _why_not(options: argparse.Namespace, command: Sequence[str], before: Sequence[Stage]) -> str:
    """Return why a stage of the scaled-down job is left out; empty if it is not."""
    if options.dry_run:
        return f"--dry-run: {shlex.join(command)}"
    if options.no_scaled_down_job:
        return "--no-scaled-down-job"
    return "something above failed" if any(stage.state == FAILED for stage in before) else ""


def _shown(stage: Stage) -> Stage:
    lines = stage.said.strip().splitlines() or [""]
    print(f"{stage.state:<10}{stage.name:<11}{lines[0] if stage.state != PASSED else stage.about}", flush=True)
    for line in lines[1:] if stage.state == FAILED else ():
        print(f"{'':<21}{line}")
    return replace(stage, said=stage.said.strip())


def _checks(options: argparse.Namespace, given: list[str]) -> tuple[str, str]:
    """Run the entry point's --check, which every launcher calls before it starts anything."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        if options.stack == "2026":
            code = jobs_2026.main(["--config-name", options.config_name, *given])
        else:
            code = main_ppo.main(["--config-name", options.config_name, "--check", *given])
    return (PASSED if code == 0 else FAILED), said.getvalue().strip().removeprefix("error: ")


def _plan(options: argparse.Namespace, given: list[str]) -> tuple[str, str]:
    try:
        model = read_model(options.model) if options.model else None
        own = [setting(_MODEL, options.model.parent)] if options.model else []
        config, planned = _configured(options, [*own, *given], model)
        folder = Path(config["actor_rollout_ref"]["model"]["path"]).expanduser()
        if model is None and not (folder / "config.json").is_file():
            return LEFT_OUT, f"--model is missing: {folder} has no config.json here. Set it to one"
        model = model or read_model(folder / "config.json")
        outside = outside_torch(_cluster_file(options), CANN_MEMORY)
        disk = _free(Path(config["trainer"]["default_local_dir"])) if config["trainer"]["save_freq"] > 0 else 0
        problems = planned(model, Machine(options.die, disk=disk, outside=outside)).problems()
    except (ValueError, OSError) as error:
        return FAILED, str(error)
    return (FAILED if problems else PASSED), "\n".join(problems)


def _configured(
    options: argparse.Namespace, words: list[str], model: dict[str, Any] | None
) -> tuple[dict[str, Any], Callable[[dict[str, Any], Machine], JobPlan | FsdpPlan]]:
    """Return the checked configuration, and a function that plans it for a model and a machine.

    Raises ValueError if the configuration is rejected.
    """
    if options.stack == "2026":
        checked = check_job(compose_job(options.config_name, words), model)
        return checked, lambda model, machine: make_verl_0_9_plan(checked, model, machine)
    config, swaps = configuration_of(options.config_name, words, model, options.chip)
    return config, lambda model, machine: make_plan(config, model, options.swap_optimizer or swaps, machine)


def _free(folder: Path) -> int:
    """Return the free bytes on the disk on which a folder is or will be."""
    folder = folder.expanduser().absolute()
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def _node(options: argparse.Namespace) -> tuple[str, str]:
    if not options.cluster:
        return LEFT_OUT, "no --cluster was given"
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = doctor.main(["--cluster", str(options.cluster), "--no-self-test", "--stack", options.stack])
    lines = said.getvalue().splitlines()
    return (PASSED, said.getvalue()) if code == 0 else (FAILED, "\n".join(x for x in lines if not x.startswith("ok")))


def _device() -> tuple[str, str]:
    """Run the self-test of this machine's dies, if it has any."""
    findings = check_device()
    bad = [finding.line() for finding in findings if finding.remedy]
    if bad:
        return FAILED, "\n".join(bad)
    looked = any(finding.known for finding in findings)
    return (PASSED if looked else LEFT_OUT), "\n".join(
        finding.line() if looked else finding.detail for finding in findings
    )


def _run(command: Sequence[str], log: Path, signals: SignalFlag) -> tuple[str, str]:
    """Run a command of the scaled-down job to its end."""
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    code = run_to_the_end(command, environment, ROOT, log, signals)
    if code == 0:
        return PASSED, log.read_text(errors="replace")
    return FAILED, f"{last_error(log)}\nwhole log: {log}"


def _validation(scaled: TrainedJob, place: Path) -> tuple[str, str]:
    """Return the validation's metrics, or where to look if there are none.

    Removes files of an earlier preflight in this folder.
    """
    scaled.forget()
    found = scaled.validated()
    if not found:
        return FAILED, f"the last step has no metric of a validation; see {place}"
    return PASSED, "\n".join(f"{name} = {value}" for name, value in found.items())


def _same_score(scaled: ScaledDownJob2026, ended: tuple[str, str]) -> tuple[str, str]:
    """Return the result of an evaluation, which fails if its score is not the validation's."""
    if ended[0] != PASSED:
        return ended
    try:
        scores = scaled.scores()
    except ValueError as error:
        return FAILED, str(error)
    if scores is None:
        return PASSED, f"not compared with the validation, whose reward has reward_kwargs\n{ended[1]}"
    evaluated, validated = scores
    if not math.isclose(evaluated, validated, abs_tol=_SAME_SCORE):
        return FAILED, f"the export's greedy answers score {evaluated:.4g}, the run's validation {validated:.4g}"
    return PASSED, f"greedy answers score {evaluated:.4g}, as in the run's validation\n{ended[1]}"


def _first_step(scaled: ScaledDownJob2026) -> tuple[str, str]:
    """Return the metrics with which a cluster's first step is compared, as docs/cluster-2026.md describes."""
    found = scaled.first_step()
    missing = [name for name, value in found.items() if value is None]
    if missing:
        return FAILED, f"the first step has no finite {', '.join(missing)}; see {scaled.run}"
    return PASSED, "\n".join(f"{name} = {value:.4g}" for name, value in found.items())


def _write_page(options: argparse.Namespace, stages: Sequence[Stage], passed: bool) -> None:
    from post_training.report.run_page import environment

    template = environment().get_template("preflight.html")
    facts = [{"stage": each.name, "state": each.state, "said": each.said} for each in stages]
    for name, text in (
        ("preflight.json", json.dumps(facts, indent=1) + "\n"),
        ("preflight.html", template.render(name=options.config_name, stages=stages, passed=passed)),
    ):
        write_text_durably(options.output / name, masked_text(text))


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
