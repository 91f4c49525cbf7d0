#!/usr/bin/env python3
r"""Search the settings with which a job is fastest, or learns best.

Optuna proposes; a trial that the plan or the checks reject is never started, and the rest is run and measured. Run the
same command again to resume an interrupted search.

Examples: the 256-die job on paper; a rehearsal, measured; its learning rate:
    python scripts/tune.py --config-name deepseek_v3_256die_true_weight \
        --model deepseek-v3/config.json --swap-optimizer
    python scripts/tune.py --steps 4 --trials 10 -- bash scripts/rehearse.sh
    python scripts/tune.py --objective reward --algorithm --steps 20 \
        --trials 12 -- bash scripts/rehearse.sh

Writes the best overrides to best.yaml in the output folder, prints a table, and saves Optuna's plots as PNG files.

Exit codes: 0 done; 1 no trial has a value; 2 arguments, space or configuration rejected; 130 Ctrl-C; 143 terminated.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import absolute, finite, whole  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.masking import masked, masked_output  # noqa: E402
from post_training.plan.placement_text import parse_bytes  # noqa: E402
from post_training.plan.report import Machine  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag  # noqa: E402
from post_training.run_lock import FolderInUse, owning  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.tuning.space import Space, algorithm_space, as_text, read_space, speed_space  # noqa: E402
from scripts.plan import CANN_MEMORY, outside_torch  # noqa: E402
from scripts.tuning.subject import Subject, describe_job, describe_rehearsal, is_rehearsal  # noqa: E402

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from post_training.tuning.search import Objective

_SIGNALLED = 128
_CLUSTER = ROOT / "scripts" / "env" / "a3_256_dies.env"
_OBJECTIVES = ("tokens", "reward", "seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and return the exit code."""
    options = _options(sys.argv[1:] if arguments is None else list(arguments))
    try:
        subject = _subject(options)
        config, _ = subject.configuration({})
        space = _space(options, config, subject)
        if options.objective == "seconds":
            _check_modelled(subject, config)
        # Check that every key of the space exists, whatever its values.
        _compose_first(subject, space)
        if options.dry_run:
            return _show(options, subject, space)
        if find_spec("optuna") is None:
            lock = "requirements/tune.lock"
            raise ValueError(f"optuna is not installed here: pip install --require-hashes --no-deps -r {lock}")
        with SignalFlag() as signals, owning([options.output], "tune"):
            return _search(options, subject, config, space, signals)
    except (ValueError, OSError, FolderInUse) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as interrupted:
        print(f"interrupted; run the same command with --output {options.output} to resume", file=sys.stderr)
        return _SIGNALLED + interrupted.number


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        description=__doc__,
        usage="%(prog)s [OPTIONS] [KEY=VALUE...] [-- COMMAND]",
    )
    parser.add_argument(
        "--config-name", metavar="NAME", help="a file of verl_patches/trainer/config; a rehearsal needs none"
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="the model's config.json, for the plan")
    parser.add_argument("--objective", choices=_OBJECTIVES, help="what to optimize: tokens per second of runs (default "
                        "with a command), their reward, or modelled seconds of a step (default without)")  # fmt: skip
    parser.add_argument("--space", type=Path, metavar="FILE", help="what to search (default: what --dry-run prints)")
    parser.add_argument("--algorithm", action="store_true", help="search learning rate, KL and clip, not speed")
    parser.add_argument("--trials", type=whole(1), default=40, help="trials, rejected ones included (default: 40)")
    parser.add_argument("--steps", type=whole(1), default=5, help="steps per run (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default: 0)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write, or to resume")
    memory = "usable memory of a die (default: %(default)s)"
    parser.add_argument("--die-memory", default="61GiB", metavar="SIZE", help=memory)
    parser.add_argument("--swap-optimizer", action="store_true", help="MindSpeed keeps the optimizer on the host")
    cluster = "sets HCCL_BUFFSIZE and, for seconds, the dies (default: scripts/env/a3_256_dies.env)"
    parser.add_argument("--cluster", type=Path, default=_CLUSTER, metavar="FILE", help=cluster)
    prompt = "for seconds: mean prompt length (default: 78)"
    parser.add_argument("--prompt-tokens", type=finite(), default=78, help=prompt)
    parser.add_argument(
        "--response-tokens", type=finite(), help="for seconds: mean response length (default: the longest)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the space and the first command, and start nothing"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides of every trial")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_intermixed_args(arguments[:place])
    options.command = arguments[place + 1 :]
    options.objective = options.objective or ("tokens" if options.command else "seconds")
    if sentence := _contradiction(options):
        parser.error(sentence)
    name = datetime.now().strftime("%Y%m%d-%H%M%S")
    options.output = absolute(options.output or ROOT / "outputs" / "tune" / name)
    return options


def _contradiction(options: argparse.Namespace) -> str:
    """Return how options contradict each other; empty if they do not."""
    if options.objective == "seconds":
        if options.command:
            return "--objective=seconds starts nothing. Remove the command"
        if options.model is None:
            return (
                "--objective=seconds needs --model, the model's config.json. To measure runs, pass a command after --"
            )
    elif not options.command:
        return f"--objective={options.objective} is measured. Pass a command after --, such as bash scripts/rehearse.sh"
    if options.algorithm and options.objective != "reward":
        return f"--algorithm changes what is learned, which {options.objective} do not show. Add --objective reward"
    if options.objective == "reward" and not (options.algorithm or options.space):
        return "--objective reward needs --algorithm or --space: speed settings do not change what is learned"
    if options.algorithm and options.space:
        return "--algorithm and --space both define the search. Remove one of them"
    if options.command and shutil.which(options.command[0]) is None:
        return f"Command not found: {options.command[0]}. Pass a launcher after --, such as bash and its path"
    if is_rehearsal(options.command) and (options.config_name or options.model):
        return "a rehearsal has its own configuration and model. Remove --config-name and --model"
    if not is_rehearsal(options.command) and not options.config_name:
        return "--config-name is missing. Set it to a file of verl_patches/trainer/config"
    return ""


def _subject(options: argparse.Namespace) -> Subject:
    if is_rehearsal(options.command):
        return describe_rehearsal(options.command, options.overrides)
    outside = outside_torch(options.cluster, CANN_MEMORY)
    machine = Machine(parse_bytes(options.die_memory), outside=outside)
    return describe_job(
        options.config_name, options.overrides, options.command, options.model, machine, options.swap_optimizer
    )


def _space(options: argparse.Namespace, config: Mapping[str, Any], subject: Subject) -> Space:
    if options.space:
        return read_space(options.space)
    return algorithm_space(config) if options.algorithm else speed_space(config, subject.layers(config))


def _compose_first(subject: Subject, space: Space) -> None:
    """Raise ValueError if a key of the space does not exist."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from post_training.tuning.space import overrides
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.main_ppo import compose

    first = {key: value for each in space for key, value in each.first().items()}
    try:
        compose(subject.config_name, [*subject.given, *overrides(first)])
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(sentence_of(error)) from error


def _check_modelled(subject: Subject, config: Mapping[str, Any]) -> None:
    if subject.layers(config) is None:
        raise ValueError(f"seconds are modelled for Megatron's steps, but {subject.config_name} trains with FSDP")


def _show(options: argparse.Namespace, subject: Subject, space: Space) -> int:
    print(f"# {options.trials} trials of {subject.config_name}, by {options.objective}; files in {options.output}")
    refused = subject.refusal({})
    print(f"# As configured: {refused or 'nothing is rejected'}")
    if subject.command:
        print(f"# {shlex.join(subject.run(options.output / 'trials' / '0000', options.steps, {}))}")
    print(as_text(space), end="")
    return 0


def _objective(options: argparse.Namespace, subject: Subject, signals: SignalFlag) -> Objective:
    from post_training.plan.step_time.configured import read_cluster
    from scripts.tuning.objectives import Modelled, OfRuns, reward, tokens_a_second

    if options.objective == "seconds":
        return Modelled(subject, read_cluster(options.cluster), options.prompt_tokens, options.response_tokens)
    unit, value_of = ("tokens/s", tokens_a_second) if options.objective == "tokens" else ("reward", reward)
    return OfRuns(subject, options.output / "trials", options.steps, signals, unit, value_of)


def _search(
    options: argparse.Namespace, subject: Subject, config: Mapping[str, Any], space: Space, signals: SignalFlag
) -> int:
    from post_training.tuning import results
    from post_training.tuning.search import Search, describe_asked, opened, propose_configured

    objective = _objective(options, subject, signals)
    asked = describe_asked(
        space, objective=options.objective, configuration=subject.config_name, overrides=tuple(masked(subject.given)),
        command=tuple(masked(subject.command)), steps=options.steps,
    )  # fmt: skip

    def shown(trial: FrozenTrial) -> None:
        print(results.line(trial), flush=True)
        if signals.received:
            raise Interrupted(signals.received[0])

    with opened(options.output, objective, options.trials, options.seed, asked) as study:
        propose_configured(study, space, config)
        Search(space, subject.refusal, objective, options.trials).carry_out(study, shown)
        print(f"\n{results.table(study, objective.unit)}")
        best = results.write_best(study, objective.unit, options.output)
        if best is None:
            print("error: no trial has a value; see the reasons above", file=sys.stderr)
            return 1
        drawn = results.draw(study, objective.unit, options.output)
    print(f"\n{options.output}: {', '.join([results.BEST, *drawn])}")
    print(" ".join(best.user_attrs["settings"]))
    return 0


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
