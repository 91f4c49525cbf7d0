#!/usr/bin/env python3
"""Time the weight tools beside straightforward single-process references on one checkpoint.

Makes a synthetic FP8 DeepSeek-V3 of --gigabytes and one of a quarter of it, and measures
  reference  FP8 -> BF16 files -> Megatron shards: load whole files, torch
             operations, save (tests/.../reference.py)
  tools      FP8 -> Megatron shards in one pass,
             scripts/convert_ckpt_deepseek3.py

Then the shards are compared bit for bit. Inputs are dropped from the page cache before each run; the reference is not
charged for syncing its files, the tools sync theirs. Needs about 5.5 times --gigabytes on the disk of --work.

Example:
    python benchmarks/weights.py --work DIR --gigabytes 8
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402

from benchmarks.options import make_parser, write_results  # noqa: E402
from post_training.arguments import finite, whole  # noqa: E402
from post_training.models.deepseek_v3 import hf_shapes  # noqa: E402
from tests.post_training.checkpoint.reference import ShardLayout, cast_folder, save_shards  # noqa: E402
from tests.post_training.checkpoint.synthetic import Synthetic, small_config  # noqa: E402

LAYOUT = dict(tp=2, pp=2, ep=2, tp_extend_ep=True)
_SAMPLE_S = 0.2


@dataclass(frozen=True)
class Measured:
    """The cost of a command with all its processes.

    Attributes:
        wall_s, cpu_s: wall and processor seconds.
        peak_process_rss: of its largest process, including mapped files.
        peak_total_pss: of all its processes together, sampled.
        written: bytes of the files that it left.
    """

    wall_s: float
    cpu_s: float
    peak_process_rss: int
    peak_total_pss: int
    written: int


def checkpoint(layers: int, experts: int) -> Synthetic:
    """DeepSeek-V3 with experts of the size that V2-Lite has; one dense layer."""
    config = small_config(
        vocab_size=32768,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=experts,
        n_group=8,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    )
    return Synthetic(config, files=max(layers, 2), random_codes=True)


def layout(layers: int) -> ShardLayout:
    return ShardLayout(stages=(layers - layers // 2, layers // 2), **LAYOUT)


def measure(command: list[str], output: Path, cold: Path) -> Measured:
    """Run a command whose result is the folder `output`, with the files of `cold` out of the page cache."""
    os.sync()
    for file in cold.rglob("*.safetensors"):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begun = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    peaks, ended = [0], threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peaks, ended))
    sampler.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begun
    ended.set()
    sampler.join()
    if status:
        raise RuntimeError(f"{' '.join(command)} failed")
    written = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    return Measured(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, max(peaks), written)


def _sample(root: int, peaks: list[int], ended: threading.Event) -> None:
    while not ended.wait(_SAMPLE_S):
        peaks.append(sum(_pss(process) for process in _family(root)))


def _family(process: int) -> list[int]:
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return []
    return [process, *(member for child in children for member in _family(int(child)))]


def _pss(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def this(step: str, *arguments: object) -> list[str]:
    """Return the command that runs one step of the reference in a process of its own."""
    return [sys.executable, str(Path(__file__).resolve()), "--step", step, *map(str, arguments)]


def tool(source: Path, output: Path, layers: int, workers: int) -> list[str]:
    script = ROOT / "scripts" / "convert_ckpt_deepseek3.py"
    paths = ["--load-dir", str(source), "--save-dir", str(output), "--workers", str(workers)]
    return [sys.executable, str(script), *paths, *layout(layers).options()]


def compare(work: Path, gigabytes: float, experts: int, workers: int) -> dict[str, Measured]:
    """Return all measurements by name. Raises RuntimeError if a command fails or the shards are not equal."""
    layers = 2
    while (
        sum(torch.Size(dims).numel() for dims in hf_shapes(checkpoint(layers, experts).shape).values())
        < gigabytes * 1e9
    ):
        layers += 1
    smaller = max(layers // 4, 2)
    for name, count in (("small", smaller), ("large", layers)):
        subprocess.run(this("generate", work / name, count, experts), check=True)
    results = {}
    results["tools, quarter size"] = measure(
        tool(work / "small", work / "small_shards", smaller, workers), work / "small_shards", work / "small"
    )
    shutil.rmtree(work / "small_shards")
    shutil.rmtree(work / "small")
    results["reference, cast"] = measure(this("cast", work / "large", work / "bf16"), work / "bf16", work / "large")
    results["reference, shards"] = measure(
        this("shards", work / "bf16", work / "reference", layers, experts), work / "reference", work / "bf16"
    )
    shutil.rmtree(work / "bf16")
    results["tools"] = measure(tool(work / "large", work / "shards", layers, workers), work / "shards", work / "large")
    verify = [sys.executable, str(ROOT / "scripts" / "verify_ckpt.py"), str(work / "shards"), str(work / "reference")]
    options = [option.replace("--target-", "--source-") for option in layout(layers).options()]
    subprocess.run([*verify, "--hf-dir", str(work / "large"), *options], check=True)
    return results


def report(results: dict[str, Measured], source_bytes: int) -> dict:
    """Return results and ratios as they are printed."""
    cast, shards, tools = (results[name] for name in ("reference, cast", "reference, shards", "tools"))
    return {
        "source_bytes": source_bytes,
        "runs": {name: asdict(measured) for name, measured in results.items()},
        "wall_ratio": tools.wall_s / (cast.wall_s + shards.wall_s),
        "cpu_ratio": tools.cpu_s / (cast.cpu_s + shards.cpu_s),
        "written_ratio": tools.written / (cast.written + shards.written),
        "rss_ratio_of_sizes": tools.peak_process_rss / results["tools, quarter size"].peak_process_rss,
    }


def run_step(step: str, arguments: list[str]) -> None:
    """Run one step in its own process: generate FOLDER LAYERS EXPERTS, cast FROM TO, shards FROM TO LAYERS EXPERTS."""
    if step == "cast":
        cast_folder(Path(arguments[0]), Path(arguments[1]))
        return
    layers, experts = map(int, arguments[-2:])
    model = checkpoint(layers, experts)
    if step == "generate":
        model.write(Path(arguments[0]))
    else:
        save_shards(Path(arguments[0]), Path(arguments[1]), model.shape, layout(layers))


def main() -> int:
    """Runs the benchmark or, started by itself, one step of it."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for the files; must not exist, is removed at the end"
    )
    parser.add_argument(
        "--gigabytes", type=finite(above=0), default=8.0, help="size of the FP8 checkpoint (default: 8)"
    )
    parser.add_argument(
        "--experts", type=whole(8), default=128, help="experts of a layer (default: 128; 8 for a trial)"
    )
    parser.add_argument("--workers", type=whole(1), default=2, help="processes of the tools (default: 2)")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        run_step(options.step[0], options.step[1:])
        return 0
    if options.work is None or options.work.exists():
        parser.error(f"--work={options.work} is invalid: it exists. Set it to a new folder")
    try:
        options.work.mkdir(parents=True)
    except OSError as error:
        parser.error(f"--work={options.work} is invalid: it cannot be created ({error.strerror})")
    try:
        results = compare(options.work, options.gigabytes, options.experts, options.workers)
        size = sum(file.stat().st_size for file in (options.work / "large").glob("*.safetensors"))
        summary = report(results, size)
        print(json.dumps(summary, indent=1))
        write_results(options.json, summary)
    finally:
        shutil.rmtree(options.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
