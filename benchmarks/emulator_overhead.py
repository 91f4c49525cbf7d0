"""Measure a transformer layer on the emulated NPU beside the same layer on the CPU: wall time and processor time.

The emulator computes with torch's CPU kernels, so the ratio above 1 is the cost of the device. Both sides run in one
process and take turns of a few milliseconds, so that other load on the machine affects both; a metric is the median
of the turns, and a ratio the median of the ratios of neighbouring turns. One thread computes.

torch_npu's task queue is a second thread, which processor time includes.

Example:
    python benchmarks/emulator_overhead.py --widths 64 256 --pairs 100
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as functional
import torch_npu  # noqa: F401
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import whole  # noqa: E402

BATCH, SEQUENCE, HEADS = 4, 64, 4
TURN_SECONDS = 0.02


class TransformerLayer(nn.Module):
    """Attention and a gated MLP, each after a normalisation and beside a residual connection, as in Llama."""

    def __init__(self, width: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.gate_up = nn.Linear(width, 8 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, sequence, width = states.shape
        heads = self.query_key_value(self.attention_norm(states)).view(batch, sequence, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.projection(attended.transpose(1, 2).reshape(batch, sequence, width))
        gate, up = self.gate_up(self.mlp_norm(states)).chunk(2, -1)
        return states + self.down(functional.silu(gate) * up)


def forward_step(width: int, device: str) -> Callable[[], object]:
    layer = TransformerLayer(width).to(device)
    states = torch.randn(BATCH, SEQUENCE, width).to(device)

    def step() -> None:
        with torch.no_grad():
            layer(states)

    return step


def training_step(width: int, device: str) -> Callable[[], object]:
    layer = TransformerLayer(width).to(device)
    states = torch.randn(BATCH, SEQUENCE, width).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step() -> None:
        layer(states).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Comparison:
    """Milliseconds of one step, by device and clock, and the ratios NPU to CPU."""

    step: str
    width: int
    cpu_wall_ms: float
    npu_wall_ms: float
    wall_ratio: float
    cpu_processor_ms: float
    npu_processor_ms: float
    processor_ratio: float


def turn(step: Callable[[], object], repetitions: int) -> tuple[float, float]:
    """Return wall and processor seconds of one step, over some repetitions, until the device is done."""
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(repetitions):
        step()
    torch.npu.synchronize()
    return (time.perf_counter() - wall) / repetitions, (time.process_time() - processor) / repetitions


def compare(name: str, make_step: Callable, width: int, pairs: int) -> Comparison:
    steps = {device: make_step(width, device) for device in ("cpu", "npu")}
    for step in steps.values():
        turn(step, 5)
    repetitions = max(1, round(TURN_SECONDS / turn(steps["cpu"], 5)[0]))
    turns: dict[str, list[tuple[float, float]]] = {"cpu": [], "npu": []}
    for number in range(pairs):
        # Who comes first changes, so that neither always runs in the other's warm caches.
        for device in ("cpu", "npu") if number % 2 else ("npu", "cpu"):
            turns[device].append(turn(steps[device], repetitions))
    wall = {device: [each[0] for each in taken] for device, taken in turns.items()}
    processor = {device: [each[1] for each in taken] for device, taken in turns.items()}

    def ratio(clock: dict[str, list[float]]) -> float:
        return statistics.median(npu / cpu for cpu, npu in zip(clock["cpu"], clock["npu"], strict=True))

    return Comparison(
        name,
        width,
        1e3 * statistics.median(wall["cpu"]),
        1e3 * statistics.median(wall["npu"]),
        ratio(wall),
        1e3 * statistics.median(processor["cpu"]),
        1e3 * statistics.median(processor["npu"]),
        ratio(processor),
    )


def table(comparisons: list[Comparison]) -> str:
    head = f"{'step':9}{'width':>6} | {'CPU ms':>8}{'NPU ms':>8}{'ratio':>7} | {'CPU ms':>8}{'NPU ms':>8}{'ratio':>7}"
    lines = [f"{'':15} | {'wall time':^23} | {'processor time':^23}", head, "-" * len(head)]
    for row in comparisons:
        lines.append(
            f"{row.step:9}{row.width:6} | {row.cpu_wall_ms:8.3f}{row.npu_wall_ms:8.3f}{row.wall_ratio:6.2f}x"
            f" | {row.cpu_processor_ms:8.3f}{row.npu_processor_ms:8.3f}{row.processor_ratio:6.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--widths", type=whole(1), nargs="+", default=[64, 256], help="default: 64 256")
    parser.add_argument("--pairs", type=whole(1), default=100, help="turns of each device (default: 100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = {"forward": forward_step, "training": training_step}
    comparisons = [compare(name, made[name], width, options.pairs) for width in options.widths for name in made]
    print(f"one layer, {BATCH} sequences of {SEQUENCE} tokens, float32, one thread, medians of {options.pairs} pairs")
    print(table(comparisons))
    write_results(options.json, [asdict(row) for row in comparisons])


if __name__ == "__main__":
    main()
