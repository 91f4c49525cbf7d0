"""Captured graphs, which are not emulated."""


class NPUGraph:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("NPUGraph is not emulated")


class graph:
    def __init__(self, *args, **kwargs):
        raise NotImplementedError("torch.npu.graph is not emulated")


def _not_emulated(name: str):
    def refuse(*args, **kwargs):
        raise NotImplementedError(f"torch.npu.{name} is not emulated")

    refuse.__name__ = name
    return refuse


make_graphed_callables = _not_emulated("make_graphed_callables")
graph_pool_handle = _not_emulated("graph_pool_handle")
graph_task_group_begin = _not_emulated("graph_task_group_begin")
graph_task_group_end = _not_emulated("graph_task_group_end")
graph_task_update_begin = _not_emulated("graph_task_update_begin")
graph_task_update_end = _not_emulated("graph_task_update_end")


def is_current_stream_capturing() -> bool:
    return False
