"""vLLM registers its custom operators on torch 2.5.1."""

import typing

from overlay import wrap


@wrap(
    "vllm.utils:direct_register_custom_op",
    feature="vllm_on_torch_2_5",
    why="torch 2.5.1 infers operator schemas from typing.List and refuses list[int]; vLLM 0.9.1 is written for 2.7",
    upstream="not forwarded: vllm-ascend changes the same annotations, but only in rollout workers, and the driver of "
    "verl imports vLLM too",
    remove_when="the pinned torch is 2.6 or later",
)
def direct_register_custom_op(upstream, op_name, op_func, *args, **kwargs):
    spelling_of_2_5 = {
        list[int]: typing.List[int],  # noqa: UP006 - the spelling is the point
        typing.Optional[list[int]]: typing.Optional[typing.List[int]],  # noqa: UP006, UP045
    }
    for name, annotation in op_func.__annotations__.items():
        op_func.__annotations__[name] = spelling_of_2_5.get(annotation, annotation)
    return upstream(op_name, op_func, *args, **kwargs)
