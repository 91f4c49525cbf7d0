#!/usr/bin/env python3
r"""Plan what a job needs before it starts: batches, memory by phase, hosts, disks, and what does not fit.

Supports jobs on Megatron and on FSDP. Where an FSDP job does not fit, the plan names settings with which it does.

Example: the job with true weights on dies of 64 GB; the seconds of its steps; and the layouts on fewer nodes:
    python scripts/plan.py --config-name deepseek_v3_256die_true_weight \
        --model deepseek-v3/config.json --swap-optimizer
    python scripts/plan.py --config-name deepseek_v3_256die_true_weight \
        --model deepseek-v3/config.json --time --cluster FILE
    python scripts/plan.py --config-name deepseek_v3_256die_true_weight \
        --model deepseek-v3/config.json --fewer-nodes

The same for the stack 2026; --time models its weight sync:
    .venv-2026/bin/python scripts/plan.py --stack 2026 \
        --config-name qwen3_0_6b_gsm8k_one_card --model qwen3-0.6b/config.json
    .venv-2026/bin/python scripts/plan.py --stack 2026 --time \
        --config-name deepseek_v3_671b_256_dies --model deepseek-v3/config.json

Exit codes: 0 everything fits; 1 something does not; 2 the configuration is rejected.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.arguments import finite, whole  # noqa: E402
from post_training.chips import A3  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.environment_files import read_environment  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.overrides import setting  # noqa: E402
from post_training.plan.fewer_nodes import Plan, describe_layouts, find_layouts  # noqa: E402
from post_training.plan.fsdp import read_fsdp_job  # noqa: E402
from post_training.plan.fsdp_report import SPARE, FsdpPlan, describe_fsdp, make_fsdp_plan  # noqa: E402
from post_training.plan.fsdp_suggestions import suggestions  # noqa: E402
from post_training.plan.job import Job, read_job  # noqa: E402
from post_training.plan.outside_torch import NOTHING_OUTSIDE, OutsideTorch  # noqa: E402
from post_training.plan.placement_text import parse_bytes  # noqa: E402
from post_training.plan.report import JobPlan, Machine, describe, make_job_plan  # noqa: E402
from post_training.plan.step_time.configured import read_cluster, step_job  # noqa: E402
from post_training.plan.step_time.job import SPREAD, Cluster, StepJob  # noqa: E402
from post_training.plan.step_time.text import describe_time, time_estimates  # noqa: E402
from post_training.plan.sync_time import describe_sync, sync_estimates  # noqa: E402
from post_training.plan.verl_0_9_jobs import make_verl_0_9_plan  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import FileError, read_object  # noqa: E402
from verl_patches.trainer.configuration_checks.values import resolved  # noqa: E402

CANN_MEMORY, DIE_MEMORY = "117MiB", "61GiB"
_P2P = "P2P_HCCL_BUFFSIZE"
_CLUSTERS = {"2025": "a3_256_dies.env", "2026": "one_node_2026.env"}


def main(arguments: list[str] | None = None) -> int:
    """Plan the job and return the exit code."""
    parser = CommandParser(description=__doc__)
    names = "a file of verl_patches/trainer/config, or of verl_plugin/config"
    parser.add_argument("--config-name", required=True, metavar="NAME", help=names)
    parser.add_argument(
        "--stack",
        choices=_CLUSTERS,
        default="2025",
        help="versions of upstream (docs/stacks.md): 2026 plans the jobs of verl_plugin/config, with the Python of "
        ".venv-2026/, with --time only the weight sync, and without --fewer-nodes (default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="the model's config.json")
    _add_options_of_the_machine(parser)
    parser.add_argument("--json", action="store_true", help="print bytes per die, or with --time seconds, as JSON")
    _add_time_options(parser)
    _add_options_of_fewer_nodes(parser)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, as for the training")
    options = parser.parse_intermixed_args(arguments)
    options.cluster = options.cluster or ROOT / "scripts" / "env" / _CLUSTERS[options.stack]
    try:
        if options.picture and not options.time:
            raise ValueError("--picture draws the time of a step. Add --time")
        if options.time and options.fewer_nodes:
            raise ValueError("--time and --fewer-nodes are two plans. Remove one of them")
        if options.stack == "2026" and (options.picture or options.fewer_nodes):
            asked = "--picture" if options.picture else "--fewer-nodes"
            raise ValueError(
                f"{asked} is invalid with --stack 2026: only memory and weight sync are planned. Remove it"
            )
        if options.time:
            print(_time(options) if options.stack == "2025" else _sync_time(options))
            return 0
        machine = _machine(options)
        if options.fewer_nodes:
            return _show_fewer_nodes(options, machine)
        plan = _plan(options, machine)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(plan.device_bytes(), indent=1))
    elif isinstance(plan, FsdpPlan):
        print("\n".join([describe_fsdp(plan), *_fitting(options, plan)]))
    else:
        print(describe(plan))
    return 1 if plan.problems() else 0


def _add_options_of_the_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--die-memory",
        metavar="SIZE",
        help="usable memory of a die (default: DIE_MEMORY of the cluster's file, or 61GiB)",
    )
    parser.add_argument("--host-memory", default="", metavar="SIZE", help="memory of a node's host")
    parser.add_argument("--disk", default="", metavar="SIZE", help="free space for checkpoints")
    parser.add_argument(
        "--storage-speed",
        type=_speed,
        default=0.0,
        metavar="X",
        help="GB/s of checkpoint storage when all nodes write; measure it (default: 0, unknown)",
    )
    parser.add_argument(
        "--swap-optimizer",
        action="store_true",
        help="the job runs with MindSpeed, which keeps the optimizer on the host; not needed where MindSpeed is "
        "installed here too",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the cluster's file, for CHIP, DIE_MEMORY, HCCL_BUFFSIZE and P2P_HCCL_BUFFSIZE (default: "
        "scripts/env/a3_256_dies.env, or with --stack 2026 one_node_2026.env there)",
    )
    parser.add_argument(
        "--cann-memory",
        default=CANN_MEMORY,
        metavar="SIZE",
        help="memory of a die that CANN takes for an idle process; npu-smi shows yours (default: %(default)s, as "
        "npu-smi shows it with CANN 8.2.RC1 on an A3 in issue 2523 of vllm-ascend)",
    )
    parser.add_argument("--emulated", action="store_true", help="dies of the emulated NPU: no HCCL buffers, no CANN")


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine that the options describe. Raises ValueError for an invalid size."""
    outside = NOTHING_OUTSIDE if options.emulated else outside_torch(options.cluster, options.cann_memory)
    die = die_bytes(options.die_memory, options.cluster)
    return Machine(die, _bytes(options.host_memory), _bytes(options.disk), outside, options.storage_speed)


def _fitting(options: argparse.Namespace, plan: FsdpPlan) -> list[str]:
    """Return lines with settings with which a job would fit: on the same dies if possible, and with memory to spare.

    All of them have passed the checks of the configuration. Empty if the job fits as it is.
    """
    if not plan.problems():
        return []
    found: list[tuple[int, float, str]] = []
    for more in suggestions(plan.job):
        try:
            other = _plan(options, plan.machine, more)
        except ValueError:
            continue
        if not isinstance(other, FsdpPlan) or other.problems():
            continue
        # A tight fit is worth naming only on the same dies; users who add dies want memory to spare.
        if other.left >= SPARE or (not found and other.job.dies == plan.job.dies):
            found.append((other.job.dies, other.left, " ".join(more)))
        if other.left >= SPARE:
            break
    return [f"fits, {left:.0%} of a die left: {settings}" for _, left, settings in found]


def die_bytes(asked: str | None, cluster: Path) -> int:
    """Return a die's usable bytes, as asked or from the cluster's file. Raises ValueError for an invalid size."""
    return parse_bytes(asked or read_environment(cluster).get("DIE_MEMORY", DIE_MEMORY))


def _add_time_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--time",
        action="store_true",
        help="print the seconds of a step on the dies of --cluster instead, modelled from published numbers",
    )
    parser.add_argument("--prompt-tokens", type=finite(), default=78, help="mean prompt length (default: %(default)s)")
    response = "mean response length (default: the longest allowed)"
    parser.add_argument("--response-tokens", type=finite(), help=response)
    parser.add_argument(
        "--response-spread",
        type=float,
        help="standard deviation of the logarithm of a response's length, which is log-normal "
        f"(default: {SPREAD:g}, as published for DeepScaleR)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="with --time: an SVG with the parts of a step")


def _add_options_of_fewer_nodes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fewer-nodes",
        action="store_true",
        help="print the layouts with which the job can continue when nodes are lost instead, and which memory is short "
        "where it cannot; supervise.py --elastic takes them",
    )
    parser.add_argument(
        "--min-nodes",
        type=whole(1),
        default=1,
        help="with --fewer-nodes: the smallest number of nodes (default: %(default)s)",
    )


def _show_fewer_nodes(options: argparse.Namespace, machine: Machine) -> int:
    """Print the layouts on fewer nodes; return 1 if there is none. Raises ValueError: see `find_layouts`."""
    config, model, _ = _configuration(options)
    path = setting("actor_rollout_ref.model.path", options.model.parent)

    def plan_of(overrides: Sequence[str]) -> tuple[dict[str, Any], Plan]:
        changed, swaps = configuration_of(options.config_name, [path, *options.overrides, *overrides], model)
        return changed, make_plan(changed, model, options.swap_optimizer or swaps, machine)

    layouts = find_layouts(config, model["num_hidden_layers"], options.min_nodes, plan_of)
    print(json.dumps(asdict(layouts), indent=1) if options.json else describe_layouts(layouts))
    return 0 if layouts.fitting else 1


def _plan(options: argparse.Namespace, machine: Machine, more: Sequence[str] = ()) -> JobPlan | FsdpPlan:
    """Make the plan that the options ask for, with further overrides."""
    if options.stack == "2025":
        return make_plan(*_configuration(options, more), machine)
    from verl_plugin.jobs import check_job, compose_job

    model = read_model(options.model)
    path = setting("actor_rollout_ref.model.path", options.model.parent)
    config = check_job(compose_job(options.config_name, [path, *options.overrides, *more]), model)
    return make_verl_0_9_plan(config, model, machine)


def make_plan(config: dict[str, Any], model: Mapping[str, Any], swaps: bool, machine: Machine) -> JobPlan | FsdpPlan:
    """Plan a checked configuration, for either back-end; `swaps` says whether MindSpeed swaps the optimizer."""
    if config["actor_rollout_ref"]["actor"]["strategy"] != "megatron":
        return make_fsdp_plan(read_fsdp_job(config, model), machine)
    return make_job_plan(read_job(config, model, swaps), machine)


def _bytes(text: str) -> int:
    return parse_bytes(text) if text else 0


def _speed(text: str) -> float:
    """Convert GB/s to bytes per second. Raises ArgumentTypeError for anything but a number above 0."""
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed. Set it to GB a second, above 0")
    return speed * 1e9


def outside_torch(cluster: Path, cann_memory: str) -> OutsideTorch:
    """Return the memory of a die used besides tensors. HCCL's default is 200 MB, and torch_npu's for two ranks 20 MB.

    Raises ValueError for an invalid size.
    """
    if not cluster.is_file():
        raise ValueError(f"--cluster={cluster} is invalid: not a file. Set it to one like scripts/env/a3_256_dies.env")
    given = read_environment(cluster)
    buffers = {"HCCL_BUFFSIZE": given.get("HCCL_BUFFSIZE", "200"), _P2P: given.get(_P2P, "20")}
    for name, megabytes in buffers.items():
        least = 0 if name == _P2P else 1  # without buffers of their own, two ranks use their group's
        if not megabytes.isascii() or not megabytes.isdigit() or int(megabytes) < least:
            raise ValueError(f"{name}={megabytes!r} in {cluster} is invalid. Set it to MB, at least {least}")
    one, of_two_ranks = (int(megabytes) << 20 for megabytes in buffers.values())
    return OutsideTorch(one, _bytes(cann_memory), of_two_ranks)


def read_model(path: Path) -> dict:
    """Read a config.json. Raises ValueError if it is none."""
    try:
        return read_object(path)
    except FileError as error:
        raise ValueError(f"--model is invalid: {error}. Set it to the model's config.json") from error


def _time(options: argparse.Namespace) -> str:
    """Return the modelled step as text or JSON, and draw it if --picture is given."""
    family = _family(options)
    if family not in (None, A3):
        raise ValueError(
            f"CHIP={family} of {options.cluster} is invalid with --time: published numbers of a step are only for "
            "Atlas A3. Set --cluster to a file with CHIP=A3"
        )
    job, config = _job(options)
    model, cluster = read_model(options.model), read_cluster(options.cluster)
    response = options.response_tokens
    spread = SPREAD if options.response_spread is None else options.response_spread
    longest = config["data"]["max_response_length"]
    lengths = options.prompt_tokens, longest if response is None else response, spread

    def job_on(dies: Cluster) -> StepJob:
        return step_job(config, job, model, dies, *lengths)

    step = job_on(cluster)
    if options.picture:
        from post_training.plan.step_time.picture import draw_time  # matplotlib, which a plan does without

        draw_time(job_on, cluster, options.picture)
    return json.dumps(time_estimates(step, cluster), indent=1) if options.json else describe_time(step, cluster)


def _sync_time(options: argparse.Namespace) -> str:
    """Return the modelled weight sync of a job of stack 2026, as text or JSON. Raises ValueError for one on FSDP."""
    plan = _plan(options, _machine(options))
    if isinstance(plan, FsdpPlan):
        raise ValueError(f"--time models weights of Megatron, but {options.config_name} trains with FSDP. Remove it")
    return json.dumps(sync_estimates(plan.reshard), indent=1) if options.json else describe_sync(plan.reshard)


def _job(options: argparse.Namespace) -> tuple[Job, dict[str, Any]]:
    """Return the job, and the configuration that describes it. Raises ValueError for one on FSDP."""
    config, model, swaps = _configuration(options)
    if config["actor_rollout_ref"]["actor"]["strategy"] != "megatron":
        raise ValueError(f"--time models Megatron's steps, but {options.config_name} trains with FSDP. Remove it")
    return read_job(config, model, swaps), config


def _configuration(
    options: argparse.Namespace, more: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the resolved configuration, the model's config.json, and whether MindSpeed swaps the optimizer."""
    model = read_model(options.model)
    path = setting("actor_rollout_ref.model.path", options.model.parent)
    overrides = [path, *options.overrides, *more]
    config, swaps = configuration_of(options.config_name, overrides, model, _family(options))
    return config, model, options.swap_optimizer or swaps


def _family(options: argparse.Namespace) -> str | None:
    """Return the family of dies that the cluster's file names; None for emulated ones."""
    return None if options.emulated or not options.cluster.is_file() else read_environment(options.cluster).get("CHIP")


def configuration_of(
    config_name: str, overrides: Sequence[str], model: Mapping[str, Any] | None, family: str | None = None
) -> tuple[dict[str, Any], bool]:
    """Return a configuration that has passed its checks, resolved, and whether MindSpeed swaps the optimizer here.

    Args:
        config_name: a file of verl_patches/trainer/config.
        overrides: Hydra's.
        model: the model's config.json; None reads it from the configuration's model.path, if this machine has it.
        family: of the dies, A2 or A3; None if it does not matter.

    Raises:
        ValueError: it cannot be composed, or a check rejects it; one sentence.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_patches.features.mindspeed.feature import MINDSPEED
    from verl_patches.trainer.configuration_checks import check_chip, check_configuration
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.main_ppo import compose

    try:
        config = compose(config_name, list(overrides))
        settings = check_configuration(config, model)
        if family:
            check_chip(resolved(config), family)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(sentence_of(error)) from error
    return resolved(config), MINDSPEED.is_on(settings) and settings.mindspeed.swap_optimizer


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
