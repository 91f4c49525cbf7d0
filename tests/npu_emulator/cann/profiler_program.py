"""Records with torch_npu's profiler on the engine cann; started by `test_profiler_on_cann`.

python -m tests.npu_emulator.cann.profiler_program FOLDER            # two recorded steps, the second with a replay
python -m tests.npu_emulator.cann.profiler_program FOLDER RANK RANKS # one recorded step with a collective
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch_npu
from torch_npu import profiler

ACTIVITIES = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]


def recording(folder: Path, steps: int) -> profiler.profile:
    """One that begins with the second step."""
    return profiler.profile(
        activities=ACTIVITIES,
        schedule=profiler.schedule(wait=1, warmup=0, active=steps, repeat=1),
        record_shapes=True,
        experimental_config=profiler._ExperimentalConfig(profiler_level=profiler.ProfilerLevel.Level1),
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
    )


def alone(folder: Path) -> None:
    matrix = torch.ones(64, 32, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch_npu.npu_swiglu(matrix @ matrix.t()).exp_()
    steps = (matrix.cos, lambda: (matrix @ matrix.t()).exp_(), lambda: (matrix.sin(), graph.replay()), matrix.tan)
    torch.npu.synchronize()
    with recording(folder, steps=2) as recorded:
        for step in steps:
            step()
            torch.npu.synchronize()
            recorded.step()


def together(folder: Path, rank: int, ranks: int) -> None:
    torch.npu.set_device(rank)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("hccl", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    tensor = torch.ones(1000, device=f"npu:{rank}")
    with recording(folder / str(rank), steps=1) as recorded:
        for _ in range(2):
            tensor.exp_()
            dist.all_reduce(tensor)
            torch.npu.synchronize()
            recorded.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        alone(Path(sys.argv[1]))
    else:
        together(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
