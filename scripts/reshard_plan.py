#!/usr/bin/env python3
r"""Plan a reshard from training to rollout and print what it moves. Needs no weights and starts no processes.

Example, the 256 dies of the recipe:
    python scripts/reshard_plan.py --model deepseek-v3 --rollout tp2,ep256 \
        --train tp4,pp8,ep8,tp_extend,layers=7/7/8/8/8/8/8/7
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser  # noqa: E402
from post_training.plan.placement_text import KNOWN, parse_bytes, parse_model, parse_placements
from post_training.report import palette  # noqa: E402
from post_training.reshard.plan import ReshardPlan  # noqa: E402
from post_training.reshard.statistics import (
    PerTensorStatistics,
    PlanStatistics,
    Spread,
    per_tensor_statistics,
    plan_statistics,
)
from post_training.terminal import escape_output  # noqa: E402


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    known = f"{', '.join(KNOWN)}, or a config.json (default: deepseek-v3)"
    parser.add_argument("--model", default="deepseek-v3", metavar="NAME", help=known)
    parser.add_argument(
        "--train", required=True, metavar="LAYOUT", help="tpN,ppN,epN[,dpN][,tp_extend][,layers=A/B/...]"
    )
    parser.add_argument("--rollout", required=True, metavar="LAYOUT", help="tpN,epN[,dpN][,instancesN][,shared_tp]")
    parser.add_argument(
        "--bucket", default="1GiB", metavar="SIZE", help="staging buffer in each direction (default: 1GiB)"
    )
    parser.add_argument("--itemsize", type=int, default=2, help="bytes per weight (default: 2, bfloat16)")
    parser.add_argument("--dies-per-node", type=int, default=16, help="dies per node (default: 16)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG with the traffic of each die")
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Ways:
    """Costs of each way to reshard; `per_tensor` is None if the published algorithm does not apply."""

    direct: PlanStatistics
    relayed: PlanStatistics
    per_tensor: PerTensorStatistics | None


def report(options: argparse.Namespace) -> tuple[Ways, ReshardPlan]:
    """Compute all statistics. Raises ValueError for options that do not fit each other."""
    for name, lowest in (("itemsize", 1), ("dies_per_node", 1)):
        if getattr(options, name) < lowest:
            raise ValueError(
                f"--{name.replace('_', '-')}={getattr(options, name)} is invalid. Set it to at least {lowest}"
            )
    table = parse_model(options.model)
    train, rollout = parse_placements(options.train, options.rollout, table.layers)
    bucket = parse_bytes(options.bucket)
    planned = partial(
        plan_statistics, table, train, rollout, bucket, itemsize=options.itemsize, ranks_per_node=options.dies_per_node
    )
    direct, _ = planned()
    relayed, plan = planned(relay=True)
    other = per_tensor_statistics(table, train, rollout, options.itemsize) if train.moe_tp_extend_ep else None
    return Ways(direct, relayed, other), plan


def table(ways: Ways) -> str:
    """Format one line per statistic, with one column per way to reshard."""
    direct, relayed, other = ways.direct, ways.relayed, ways.per_tensor

    def gigabytes(spread: Spread | None) -> str:
        if spread is None:
            return "-"
        return " / ".join(f"{value / 1e9:.2f}" for value in (spread.minimum, spread.average, spread.maximum))

    def both(name: str) -> list[str]:
        return [gigabytes(getattr(direct, name)), gigabytes(getattr(relayed, name))]

    ratios = [f"{direct.received_over_bound:.3f}", f"{relayed.received_over_bound:.3f}", _ratio(other, direct)]
    rows = [
        ["GB are min / avg / max a die", "direct", "relayed in node", "per tensor"],
        ["received, GB", *both("received"), gigabytes(getattr(other, "received", None))],
        ["lower bound, GB", *both("bound_received"), ""],
        ["received / bound", *ratios],
        ["experts received, GB", *both("expert_received"), gigabytes(getattr(other, "expert_received", None))],
        ["experts, lower bound, GB", *both("bound_expert_received"), ""],
        ["sent, GB", *both("sent"), "-"],
        ["sent, max / avg", *(f"{plan.sent_maximum_over_average:.3f}" for plan in (direct, relayed)), "-"],
        ["into a node, GB", *both("node_ingress"), "-"],
        ["collectives", str(direct.collectives), str(relayed.collectives), str(other.collectives) if other else "-"],
        ["object collectives", "0", "0", str(other.object_collectives) if other else "-"],
        ["peak staging, GB", *(f"{plan.staging_peak / 1e9:.2f}" for plan in (direct, relayed)), _staging(other)],
        ["regions received", *(f"{plan.regions.average:.0f}" for plan in (direct, relayed)), "-"],
        ["planning, CPU s a rank", *(f"{plan.plan_seconds:.2f}" for plan in (direct, relayed)), "-"],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _ratio(other: PerTensorStatistics | None, plan: PlanStatistics) -> str:
    return f"{other.received.average / plan.bound_received.average:.3f}" if other else "-"


def _staging(other: PerTensorStatistics | None) -> str:
    return f"{other.staging_peak / 1e9:.2f}" if other else "-"


def draw(plan: ReshardPlan, path: Path) -> None:
    """Write a PNG: gigabytes from die to die, and sent and received by each die."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    traffic = (plan.remote.between(plan.world_size) + plan.relay.between(plan.world_size)) / 1e9
    sent, received = palette.LIGHT[:2]
    shades = LinearSegmentedColormap.from_list("traffic", [palette.LIGHT_FRAME["ground"], sent])
    with mpl.rc_context(dict[Any, Any](palette.PICTURE_STYLE)):  # matplotlib makes ticks only when the figure is saved
        figure = Figure(figsize=(12, 5.5), layout="constrained")
        by_pair, by_die = figure.subplots(1, 2)
        image = by_pair.imshow(traffic, cmap=shades, interpolation="nearest")
        by_pair.set(title="GB from die to die, relayed in node", xlabel="receiving die", ylabel="sending die")
        figure.colorbar(image, ax=by_pair)
        by_die.plot(traffic.sum(1), label="sent", color=sent)
        by_die.plot(traffic.sum(0), label="received", color=received)
        by_die.set(title="GB by die", xlabel="die", ylim=(0, None))
        by_die.legend()
        FigureCanvasAgg(figure).print_png(str(path))


def main(arguments: list[str] | None = None) -> int:
    """Plan the reshard and return the exit status."""
    options = parse_arguments(arguments)
    try:
        ways, plan = report(options)
        if options.plot:
            draw(plan, options.plot)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(
            json.dumps(
                {name: statistics for name, statistics in asdict(ways).items() if statistics is not None}, indent=1
            )
        )
    else:
        print(table(ways))
    return 0


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
