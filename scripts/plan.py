#!/usr/bin/env python3
"""Works out what a job needs before anything starts: batches, memory by phase, hosts, disks, and what does not fit.

For jobs on Megatron and on FSDP. Example, the job with true weights on dies of 64 GB, and how long its steps would take
on the cluster of a file:
  scripts/plan.py --config-name deepseek_v3_256die_true_weight --model deepseek-v3/config.json --swap-optimizer
  scripts/plan.py --config-name deepseek_v3_256die_true_weight --model deepseek-v3/config.json --time --cluster FILE
Exit codes: 0 everything fits, 1 something does not, 2 the configuration is refused.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from post_training.environment_files import read_environment  # noqa: E402
from post_training.overrides import setting  # noqa: E402
from post_training.plan.fsdp import read_fsdp_job  # noqa: E402
from post_training.plan.fsdp_report import FsdpPlan, describe_fsdp, make_fsdp_plan  # noqa: E402
from post_training.plan.job import Job, read_job  # noqa: E402
from post_training.plan.outside_torch import NOTHING_OUTSIDE, OutsideTorch  # noqa: E402
from post_training.plan.placement_text import parse_bytes  # noqa: E402
from post_training.plan.report import JobPlan, Machine, describe, make_job_plan  # noqa: E402
from post_training.plan.step_time import Step, describe_time, step_seconds  # noqa: E402
from verl_patches.trainer.configuration_checks.values import resolved  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Plans; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config-name", required=True, help="a file of verl_patches/trainer/config")
    parser.add_argument("--model", type=Path, required=True, help="the model's config.json")
    parser.add_argument("--die-memory", default="61GiB", help="usable memory of a die (default: %(default)s)")
    parser.add_argument("--host-memory", default="", help="memory of a node's host")
    parser.add_argument("--disk", default="", help="free space for checkpoints")
    parser.add_argument(
        "--storage-speed",
        type=_speed,
        default=0.0,
        metavar="GB/s",
        help="what all nodes together write to the storage for checkpoints; measure it",
    )
    parser.add_argument(
        "--swap-optimizer",
        action="store_true",
        help="the job runs where MindSpeed is installed, which keeps the optimizer on the host; needless where it is "
        "installed here too",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        default=ROOT / "scripts" / "env" / "a3_256_dies.env",
        help="the cluster's file, for HCCL_BUFFSIZE (default: scripts/env/a3_256_dies.env)",
    )
    parser.add_argument(
        "--cann-memory",
        default="117MiB",
        help="what CANN takes of a die for a process that does nothing; npu-smi shows yours (default: %(default)s, as "
        "npu-smi showed it with CANN 8.2.RC1 on an A3 in issue 2523 of vllm-ascend)",
    )
    parser.add_argument("--emulated", action="store_true", help="dies of the emulated NPU: no HCCL buffers, no CANN")
    parser.add_argument("--json", action="store_true", help="print bytes of a die as JSON")
    parser.add_argument(
        "--time",
        action="store_true",
        help="instead, the seconds of a step on the dies of --cluster, modelled from published figures",
    )
    parser.add_argument("--prompt-tokens", type=float, default=78, help="mean of a prompt (default: %(default)s)")
    parser.add_argument("--response-tokens", type=float, help="mean of a response (default: as long as allowed)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for the training")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.time:
            print(_time(options))
            return 0
        die, host, disk = (_bytes(size) for size in (options.die_memory, options.host_memory, options.disk))
        plan = _plan(options, Machine(die, host, disk, _outside(options), options.storage_speed))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = describe_fsdp(plan) if isinstance(plan, FsdpPlan) else describe(plan)
    print(json.dumps(plan.device_figures(), indent=1) if options.json else text)
    return 1 if plan.problems() else 0


def _plan(options: argparse.Namespace, machine: Machine) -> JobPlan | FsdpPlan:
    config, model, swaps = _configuration(options)
    if config["actor_rollout_ref"]["actor"]["strategy"] != "megatron":
        return make_fsdp_plan(read_fsdp_job(config, model), machine)
    return make_job_plan(read_job(config, model, swaps), machine)


def _bytes(text: str) -> int:
    return parse_bytes(text) if text else 0


def _speed(text: str) -> float:
    """GB/s as bytes a second. Raises ArgumentTypeError for anything but a number above 0."""
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no speed; give GB a second, above 0")
    return speed * 1e9


def _outside(options: argparse.Namespace) -> OutsideTorch:
    """What is taken from a die beside tensors. HCCL's own default is 200 MB."""
    if options.emulated:
        return NOTHING_OUTSIDE
    if not options.cluster.is_file():
        raise ValueError(f"--cluster: {options.cluster} is no file; give one like scripts/env/a3_256_dies.env")
    megabytes = read_environment(options.cluster).get("HCCL_BUFFSIZE", "200")
    if not megabytes.isascii() or not megabytes.isdigit() or int(megabytes) < 1:
        raise ValueError(f"HCCL_BUFFSIZE in {options.cluster} is {megabytes!r}: give MB, 1 or more")
    return OutsideTorch(int(megabytes) << 20, _bytes(options.cann_memory))


def _model(path: Path) -> dict:
    """A config.json. Raises ValueError where it is none."""
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--model: {path} is no JSON ({type(error).__name__}); give the model's config.json"
        ) from error
    if not isinstance(model, dict):
        raise ValueError(f"--model: {path} holds a {type(model).__name__}; give the model's config.json")
    return model


def _time(options: argparse.Namespace) -> str:
    """The modelled step as text, or its seconds as JSON."""
    job, config = _job(options)
    step = modelled_step(config, job, _model(options.model), _dies(options.cluster))
    longest = float(step.longest)
    response = longest if options.response_tokens is None else options.response_tokens
    if not 0 <= options.prompt_tokens <= job.sequence_tokens or not 0 < response <= longest:
        raise ValueError(
            f"--prompt-tokens {options.prompt_tokens:g} and --response-tokens {response:g} must lie within "
            f"{job.sequence_tokens} and {longest:g} tokens, which the configuration allows"
        )
    step = replace(step, prompt_tokens=options.prompt_tokens, response_tokens=response)
    return json.dumps(step_seconds(step), indent=1) if options.json else describe_time(step)


def modelled_step(config: Mapping[str, Any], job: Job, model: dict, dies: int) -> Step:
    """The job's step on so many dies: with more of them data parallelism grows, and what does not fit shrinks."""
    overlay, pp = config["actor_rollout_ref"]["overlay"], min(job.train.pp, dies)
    agreed = overlay["dp_sync"]
    recomputation = job.recomputation
    return Step(
        model=model,
        dies=dies,
        sequences=job.sequences,
        prompt_tokens=0,
        response_tokens=0,
        longest=config["data"]["max_response_length"],
        rollout_tp=min(job.rollout.tp, dies),
        rollout_ep=min(job.rollout.ep, dies),
        engine_sequences=job.engine_sequences,
        pp=pp,
        dp=max(1, dies // (job.train.tp * pp)),
        micro=job.micro_update,
        stage_layers=max(job.train.num_layer_list),
        recomputed=recomputation.layers if recomputation and recomputation.granularity == "full" else 0,
        balanced=overlay["router_balance"]["forced"],
        between_dies=False,
        agreements="hccl" if agreed["enabled"] else "gloo",
        a_forward=1 / agreed["lease_steps"] if agreed["enabled"] else 2,
    )


def _dies(cluster: Path) -> int:
    """The dies of a cluster's file."""
    if not cluster.is_file():
        raise ValueError(f"--cluster: {cluster} is no file; give one like scripts/env/a3_256_dies.env")
    values, dies = read_environment(cluster), 1
    for name in ("NODES", "DIES_PER_NODE"):
        text = values.get(name, "")
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 4096):
            raise ValueError(f"{name} in {cluster} is {text!r}: give a number from 1 to 4096")
        dies *= int(text)
    if dies > 4096:
        raise ValueError(f"{cluster} describes {dies} dies; the model of a step reaches to 4096")
    return dies


def _job(options: argparse.Namespace) -> tuple[Job, dict[str, Any]]:
    """The job, and the configuration that describes it. Raises ValueError for one on FSDP."""
    config, model, swaps = _configuration(options)
    if config["actor_rollout_ref"]["actor"]["strategy"] != "megatron":
        raise ValueError(f"--time models Megatron's steps, and {options.config_name} trains with FSDP; take it away")
    return read_job(config, model, swaps), config


def _configuration(options: argparse.Namespace) -> tuple[dict[str, Any], dict, bool]:
    """The resolved configuration, the model's config.json, and whether MindSpeed keeps the optimizer on the host."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from verl_patches.features.mindspeed.feature import MINDSPEED
    from verl_patches.trainer.configuration_checks import check_configuration
    from verl_patches.trainer.configuration_checks.composition import sentence_of
    from verl_patches.trainer.main_ppo import compose

    model = _model(options.model)
    try:
        config = compose(
            options.config_name, [setting("actor_rollout_ref.model.path", options.model.parent), *options.overrides]
        )
        settings = check_configuration(config, model)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(sentence_of(error)) from error
    swaps = options.swap_optimizer or (MINDSPEED.is_on(settings) and settings.mindspeed.swap_optimizer)
    return resolved(config), model, swaps


if __name__ == "__main__":
    sys.exit(main())
