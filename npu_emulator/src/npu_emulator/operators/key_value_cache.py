"""Writing to and reading from a paged key-value cache [blocks, block size, heads, size]; slots number its tokens."""

import torch
from torch import Tensor

from .normalization import rms_norm
from .registry import operator
from .rotary import deinterleave, turn

CACHE_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
_NZ_COLUMN = 16  # elements of two bytes in 32 bytes


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


def tokens_of_cache(cache: Tensor, cache_format: str) -> Tensor:
    """A view [blocks, block size, heads, size / n, n] of a paged cache [blocks, block size, heads, size].

    In the plain format "ND" n is the size. A block in the private format "NZ" holds, for each head, columns of 16
    elements, each with all tokens: [heads, size / 16, block size, 16].
    """
    blocks, block_size, heads, size = cache.shape
    if cache_format == "ND":
        return cache.unsqueeze(3)
    return cache.view(blocks, heads, size // _NZ_COLUMN, block_size, _NZ_COLUMN).permute(0, 3, 1, 2, 4)


def _store_tokens(cache: Tensor, cache_format: str, slots: Tensor, states: Tensor) -> None:
    """Write states [tokens, heads, size] to their slots; those with a negative slot are not stored."""
    tokens = tokens_of_cache(cache, cache_format)
    kept = slots >= 0
    slots, states = slots[kept], states[kept]
    tokens[slots // cache.shape[1], slots % cache.shape[1]] = states.view(-1, *tokens.shape[2:]).to(cache.dtype)


def _slots_from_blocks(index: Tensor, sequence_length: int, block_size: int) -> Tensor:
    """A slot for each token, where `index` [batch * blocks of a sequence] says for each block where it begins.

    As in the kernel, only the number of the block counts: its first token goes to the beginning of the block. A block
    that begins before the first one has slots before it, which are none.
    """
    starts = index.view(-1, -(-sequence_length // block_size))
    offsets = torch.arange(sequence_length)
    begins = starts[:, offsets // block_size]
    return (begins // block_size * block_size + offsets % block_size).flatten()


def _update_caches(mode: str, index: Tensor, parts: list[tuple[Tensor, Tensor]]) -> None:
    """Write states [batch, heads, sequence, size] to caches, as `cache_mode` of npu_kv_rmsnorm_rope_cache says."""
    for cache, states in parts:
        batch, heads, length, size = states.shape
        if mode == "Norm":
            rows = torch.arange(batch).unsqueeze(-1).expand(batch, length)
            kept = index >= 0
            cache[rows[kept], :, index[kept]] = states.transpose(1, 2)[kept].to(cache.dtype)
            continue
        slots = _slots_from_blocks(index, length, cache.shape[1]) if "_BLK_" in mode else index.flatten()
        packed = states.transpose(1, 2).reshape(batch * length, heads, size)
        _store_tokens(cache, "NZ" if mode.endswith("NZ") else "ND", slots, packed)


def _kv_rmsnorm_rope_shapes(kv, gamma, cos, sin, index, k_cache, ckv_cache, **options):
    latent_size = gamma.shape[0]
    return (
        k_cache,
        ckv_cache,
        *(torch.empty_like(kv[..., part]) for part in (slice(latent_size, None), slice(latent_size))),
    )


@operator(
    "npu_kv_rmsnorm_rope_cache(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, Tensor(a!) k_cache, "
    "Tensor(b!) ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, "
    "Tensor? c_kv_offset=None, float epsilon=1e-5, str cache_mode='Norm', bool is_output_kv=False) "
    "-> (Tensor(a!), Tensor(b!), Tensor, Tensor)",
    shapes=_kv_rmsnorm_rope_shapes,
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
    """Normalises the first part of `kv` [batch, 1, sequence, size], turns the rest, and writes both to their caches.

    `cache_mode` "Norm": caches are [batch, 1, length, size] and `index` [batch, sequence] has positions. "PA" and
    "PA_BNSD": paged caches, `index` has a slot for each token. "PA_NZ": so in the private format. "PA_BLK_BNSD" and
    "PA_BLK_NZ": `index` says where each block of a sequence begins. The last two results, the turned and the
    normalised part, are written with `is_output_kv` only; otherwise they are not a number here.
    """
    if any(item is not None for item in (k_rope_scale, c_kv_scale, k_rope_offset, c_kv_offset)):
        raise NotImplementedError("npu_kv_rmsnorm_rope_cache: quantised caches are not emulated")
    if cache_mode not in CACHE_MODES:
        raise RuntimeError(f"npu_kv_rmsnorm_rope_cache: cache_mode must be one of {CACHE_MODES}, not {cache_mode!r}")
    latent_size = gamma.shape[0]
    latent, rope = kv.split([latent_size, kv.shape[-1] - latent_size], -1)
    latent, _ = rms_norm(latent, gamma, epsilon)
    rope = turn(deinterleave(rope), cos, sin).contiguous()
    _update_caches(cache_mode, index, [(k_cache, rope), (ckv_cache, latent)])
    if not is_output_kv:
        rope, latent = torch.full_like(rope, float("nan")), torch.full_like(latent, float("nan"))
    return k_cache, ckv_cache, rope, latent
