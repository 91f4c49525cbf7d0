"""Load one rank's weights in its own process, and print the memory and I/O that it took.

python -m tests.post_training.checkpoint.loading_program FOLDER (train|rollout) RANK WAY

WAY is `slices`, the loader, or `files`, which reads whole files one after the other, for comparison.
The placements are those of 8 ranks: training TP2 PP2 EP2, rollout TP2 DP4 EP8.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from post_training.checkpoint.loading import load_from_huggingface
from post_training.layouts.layout import RolloutPlacement, Shard, TrainPlacement
from post_training.models.families import table_for

MIB = 1 << 20


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes: VmRSS is the current size, VmHWM its peak."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def transferred() -> dict[str, int]:
    """Return the kernel's counters of the bytes that this process has read and written."""
    return {
        name: int(value) for name, value in (line.split(": ") for line in open("/proc/self/io").read().splitlines())
    }


def least_shape(shard: Shard) -> tuple[int, ...]:
    """Return the shape of the smallest local tensor that contains this shard's view."""
    if shard.view.shape is not None:
        return shard.view.shape
    indexed = tuple(step + 1 if isinstance(step, int) else step[1] for step in shard.view.index)
    kept = sum(not isinstance(step, int) for step in shard.view.index)
    return indexed + shard.extents[kept:]


def tensors_for(shards: list[Shard]) -> dict[str, torch.Tensor]:
    """Allocate a rank's weights in bfloat16, without touching the memory."""
    sizes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        shape = least_shape(shard)
        sizes[shard.local] = tuple(map(max, shape, sizes.get(shard.local, shape)))
    return {name: torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()}


def read_whole_files(folder: Path, tensors: dict[str, torch.Tensor], shards: list[Shard]) -> None:
    """Load naively: read each file as a whole, and copy the slices that are needed."""
    for file in sorted(folder.glob("*.safetensors")):
        stored = load_file(file)
        for shard in shards:
            if shard.hf_name in stored:
                bounds = tuple(slice(*interval) for interval in shard.bounds)
                shard.locate(tensors).copy_(stored[shard.hf_name][bounds].to(torch.bfloat16))


def main() -> None:
    folder, kind, rank, way = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    table = table_for(json.loads((folder / "config.json").read_text()))
    if kind == "train":
        stages = (table.layers - table.layers // 2, table.layers // 2)
        shards = table.megatron(TrainPlacement(tp=2, pp=2, ep=2, dp=2, num_layer_list=stages), rank)
    else:
        shards = table.vllm_ascend(RolloutPlacement(tp=2, dp=4, ep=8), rank)
    tensors = tensors_for(shards)
    Path("/proc/self/clear_refs").write_text("5")
    before, counted = status("VmRSS"), transferred()
    if way == "slices":
        load_from_huggingface(folder, tensors, shards, table.shapes, table.ignored_in_files)
    else:
        read_whole_files(folder, tensors, shards)
    after = transferred()
    print(
        json.dumps(
            {
                "shard": sum(tensor.nbytes for tensor in tensors.values()),
                "growth": status("VmHWM") - before,
                "read": after["rchar"] - counted["rchar"],
                "written": after["wchar"] - counted["wchar"],
                "to_disk": after["write_bytes"] - counted["write_bytes"],
            }
        )
    )


if __name__ == "__main__":
    main()
