"""Captured graphs (ACL graphs): work of the die that is recorded once and done again, in the same memory."""

import gc
import warnings

import torch

from npu_emulator import _C

from . import streams
from .streams import Stream
from .utils import StreamContext, current_stream, synchronize

_CAPTURE_ERROR_MODES = ("global", "thread_local", "relaxed")


def is_current_stream_capturing() -> bool:
    return _C.is_recording()


def graph_pool_handle() -> tuple[int, int]:
    """The name of a pool of memory that graphs may share. Graphs that do must be replayed in the order of capture."""
    return _C.new_graph_pool()


class NPUGraph:
    """Work of the die, recorded between `capture_begin` and `capture_end` instead of being done."""

    def __init__(self):
        self._recorded = _C.Graph()
        self.auto_dispatch_capture = False

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        """Record what the current stream is given, and those that wait for it. RuntimeError on the default stream."""
        if capture_error_mode not in _CAPTURE_ERROR_MODES:
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        stream = current_stream()
        if stream.stream_id == 0:
            raise RuntimeError(
                "NPU graphs must be captured on a non-default stream. (However, after capture, it's ok to replay them "
                "on the default stream.)"
            )
        self._recorded.begin_capture(pool)
        streams.capture = streams.CapturedStreams(stream)

    def capture_end(self) -> None:
        """End the recording. RuntimeError if the capture became invalid, or streams have not been joined again."""
        captured, streams.capture = streams.capture, None
        _C.set_bystander(False)
        self._recorded.end_capture()
        fault = captured.fault_at_end(current_stream())
        if fault:
            self._recorded.reset()
            raise RuntimeError(fault)
        if not self._recorded.size:
            warnings.warn("The NPU graph is empty: nothing was given to the die on the captured stream.", stacklevel=2)

    def replay(self) -> None:
        self._recorded.replay()

    def reset(self) -> None:
        """Forget the work; the graph can be captured anew. Memory goes back unless another graph has the same pool."""
        self._recorded.reset()

    def pool(self) -> tuple[int, int]:
        return self._recorded.pool()

    def update(self, cpu_update_input: list[dict]) -> None:
        raise NotImplementedError("NPUGraph.update is not emulated")


class graph:
    """Context manager that captures what is done inside into an NPUGraph, on `stream` or one of its own."""

    default_capture_stream: Stream | None = None

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: tuple[int, int] | None = None,
        stream: Stream | None = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ):
        if auto_dispatch_capture:
            raise NotImplementedError("torch.npu.graph: auto_dispatch_capture is not emulated")
        if stream is None and graph.default_capture_stream is None:
            graph.default_capture_stream = Stream()
        self.pool = pool
        self.capture_stream = stream or graph.default_capture_stream
        self.stream_ctx = StreamContext(self.capture_stream)
        self.npu_graph = npu_graph
        self.capture_error_mode = capture_error_mode

    def __enter__(self) -> None:
        synchronize()
        gc.collect()
        torch.npu.empty_cache()
        self.stream_ctx.__enter__()
        try:
            self.npu_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self.stream_ctx.__exit__(None, None, None)
            raise

    def __exit__(self, *exception) -> None:
        try:
            self.npu_graph.capture_end()
        finally:
            self.stream_ctx.__exit__(*exception)


def _not_emulated(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"torch.npu.{name} is not emulated")

    refuse.__name__ = name
    return refuse


make_graphed_callables = _not_emulated("make_graphed_callables")
graph_task_group_begin = _not_emulated("graph_task_group_begin")
graph_task_group_end = _not_emulated("graph_task_group_end")
graph_task_update_begin = _not_emulated("graph_task_update_begin")
graph_task_update_end = _not_emulated("graph_task_update_end")
