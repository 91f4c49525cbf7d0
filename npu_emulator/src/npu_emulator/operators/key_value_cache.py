"""Writing to and reading from a paged key-value cache [blocks, block size, heads, size]; slots number its tokens."""

from torch import Tensor

from .normalization import rms_norm
from .registry import operator
from .rotary import deinterleave, rotate_half


def as_integers(values) -> list[int]:
    """A tensor or a sequence of whole numbers as a list."""
    return values.tolist() if isinstance(values, Tensor) else [int(value) for value in values]


def store(cache: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write states [tokens, ...] to their slots of a cache; tokens whose slot is negative are not stored."""
    flat = cache.view(-1, *cache.shape[2:])
    states = states.reshape(slots.numel(), *cache.shape[2:]).to(cache.dtype)
    slots = slots.flatten().long()
    kept = slots >= 0
    if not kept.all():
        slots, states = slots[kept], states[kept]
    flat.index_copy_(0, slots, states)


def load(cache: Tensor, blocks: Tensor, start: int, stop: int) -> Tensor:
    """The tokens `start` to `stop` of the sequence that lies in these blocks of a cache."""
    block_size = cache.shape[1]
    first, last = start // block_size, -(-stop // block_size)
    tokens = cache.index_select(0, blocks[first:last].long()).flatten(0, 1)
    return tokens[start - first * block_size : stop - first * block_size]


@operator(
    "_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
    "slot_indices) -> ()",
    namespace="atb",
)
def _npu_reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor):
    store(key_cache, slot_indices, key)
    store(value_cache, slot_indices, value)


@operator(
    "_npu_reshape_and_cache_siso(Tensor key, Tensor(a!) key_cache, Tensor slot_indices) -> ()",
    namespace="atb",
)
def _npu_reshape_and_cache_siso(key: Tensor, key_cache: Tensor, slot_indices: Tensor):
    store(key_cache, slot_indices, key)


@operator(
    "npu_paged_cache_load(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, *, "
    "Tensor? seq_starts=None, Tensor(a!) key, Tensor(b!) value) -> ()",
    namespace="atb",
)
def npu_paged_cache_load(
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    seq_starts: Tensor | None = None,
):
    lengths = as_integers(context_lens)
    starts = [0] * len(lengths) if seq_starts is None else as_integers(seq_starts)
    written = 0
    for blocks, start, length in zip(block_table[: len(lengths)], starts, lengths, strict=True):
        for cache, out in ((key_cache, key), (value_cache, value)):
            rows = out[written : written + length]
            rows.copy_(load(cache, blocks, start, start + length).view_as(rows))
        written += length


@operator(
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache, "
    "Tensor(b!) ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, "
    "Tensor? c_kv_offset=None, float epsilon=1e-5, str cache_mode='Norm', bool is_output_kv=False) "
    "-> (Tensor(a!), Tensor(b!), Tensor, Tensor)"
)
def npu_kv_rmsnorm_rope_cache(
    kv: Tensor,
    gamma: Tensor,
    cos: Tensor,
    sin: Tensor,
    index: Tensor,
    k_cache: Tensor,
    ckv_cache: Tensor,
    *,
    k_rope_scale: Tensor | None = None,
    c_kv_scale: Tensor | None = None,
    k_rope_offset: Tensor | None = None,
    c_kv_offset: Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
):
    if any(item is not None for item in (k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset)):
        raise NotImplementedError("npu_kv_rmsnorm_rope_cache: quantised caches are not emulated")
    if cache_mode not in ("PA", "PA_NZ"):
        raise NotImplementedError(f"npu_kv_rmsnorm_rope_cache: cache_mode {cache_mode!r} is not emulated")
    latent_size = gamma.shape[0]
    latent, rope = kv.split([latent_size, kv.shape[-1] - latent_size], -1)
    latent, _ = rms_norm(latent, gamma, epsilon)
    rope = deinterleave(rope)
    rope = (rope * cos + rotate_half(rope) * sin).to(kv.dtype)
    store(k_cache, index, rope)
    store(ckv_cache, index, latent)
    return k_cache, ckv_cache, rope.contiguous(), latent
