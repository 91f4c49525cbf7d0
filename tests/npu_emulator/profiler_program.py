"""Records with torch_npu's profiler; started by `test_profiler`.

python -m tests.npu_emulator.profiler_program FOLDER            # two recorded steps, the second with a replay
python -m tests.npu_emulator.profiler_program FOLDER RANK RANKS # one recorded step with a collective
python -m tests.npu_emulator.profiler_program FOLDER worker     # a product, asked for as vLLM-Ascend's worker does
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
    """Record from the second step on."""
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


def like_a_worker(folder: Path) -> None:
    """Record with an explicit configuration, started and stopped from outside."""
    configuration = profiler._ExperimentalConfig(
        export_type=profiler.ExportType.Text,
        profiler_level=profiler.ProfilerLevel.Level1,
        msprof_tx=False,
        aic_metrics=profiler.AiCMetrics.AiCoreNone,
        l2_cache=False,
        op_attr=False,
        data_simplification=False,
        record_op_args=False,
        gc_detect_threshold=None,
    )
    recorded = profiler.profile(
        activities=ACTIVITIES,
        with_stack=False,
        profile_memory=False,
        with_modules=False,
        experimental_config=configuration,
        on_trace_ready=profiler.tensorboard_trace_handler(str(folder)),
    )
    matrix = torch.ones(64, 32, device="npu")
    torch.npu.synchronize()
    recorded.start()
    matrix @ matrix.t()
    torch.npu.synchronize()
    recorded.stop()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        alone(Path(sys.argv[1]))
    elif sys.argv[2] == "worker":
        like_a_worker(Path(sys.argv[1]))
    else:
        together(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
