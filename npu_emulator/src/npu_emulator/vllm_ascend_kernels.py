"""What ``vllm_ascend.vllm_ascend_C`` holds, vllm-ascend's compiled kernels: executed under that name on import."""

from collections.abc import Callable

from torch import Tensor

from npu_emulator import _C
from npu_emulator.operators.registry import operator
from npu_emulator.operators.rotary import rotate_by_table


@operator("weak_ref_tensor(Tensor input) -> Tensor", namespace="_C", on_device=True)
def weak_ref_tensor(x: Tensor):
    return _C.weak_alias(x)


@operator(
    "rotary_embedding(Tensor positions, Tensor! query, Tensor! key, int head_size, Tensor cos_sin_cache, bool is_neox) "
    "-> (Tensor query, Tensor key)",
    namespace="_C",
)
def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
):
    rows = cos_sin_cache[positions.flatten()]
    tokens = positions.numel()
    return tuple(rotate_by_table(states.reshape(tokens, -1), rows, head_size, is_neox) for states in (query, key))


@operator(
    "get_masked_input_and_mask(Tensor input, int org_vocab_start_index, int org_vocab_end_index, int "
    "num_org_vocab_padding, int added_vocab_start_index, int added_vocab_end_index) -> (Tensor masked_input, "
    "Tensor mask)",
    namespace="_C",
)
def get_masked_input_and_mask(x: Tensor, start: int, end: int, padding: int, added_start: int, added_end: int):
    """Rows of this rank's part of the vocabulary, and where a token belongs to another rank."""
    original = (x >= start) & (x < end)
    added = (x >= added_start) & (x < added_end)
    offset = start * original + (added_start - (end - start) - padding) * added
    own = original | added
    return (x - offset) * own, ~own


def init_module(made: Callable, gone: Callable) -> None:
    """Name the functions that are told of each allocation in the pool, and of its end."""
    _C.set_pool_owner(made, gone)


def python_unmap_and_release(device: int, size: int, address: int, handle: int) -> None:
    """Give the memory of one allocation back to the device; its address stays taken."""
    _C.take_pool_memory_away(address)


def python_create_and_map(device: int, size: int, address: int, handle: int) -> None:
    """Put memory at the address of an allocation again."""
    _C.put_pool_memory_back(address)
