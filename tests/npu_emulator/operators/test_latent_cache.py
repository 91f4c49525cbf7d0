"""npu_kv_rmsnorm_rope_cache against loops: its results, and their places in each mode of the cache."""

import math

import pytest
import torch
import torch_npu
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.npu_emulator.operators.compare import refused

LATENT, ROPE, BLOCKS, BLOCK = 32, 16, 5, 4


def turned_by_loop(x, angles):
    """Pairs (2i, 2i + 1) turned by their angles; first members first."""
    first = [x[2 * i] * math.cos(a) - x[2 * i + 1] * math.sin(a) for i, a in enumerate(angles)]
    second = [x[2 * i + 1] * math.cos(a) + x[2 * i] * math.sin(a) for i, a in enumerate(angles)]
    return torch.stack(first + second)


def normed_by_loop(x, gamma):
    return x / (sum(float(number) ** 2 for number in x) / len(x) + 1e-5) ** 0.5 * gamma


class Case:
    """Random input of `batch` sequences of `length` tokens, and both results by token, in float64."""

    def __init__(self, batch, length, seed):
        torch.manual_seed(seed)
        self.kv, self.gamma = torch.randn(batch, 1, length, LATENT + ROPE), torch.randn(LATENT)
        angles = torch.randn(batch, 1, length, ROPE // 2)
        self.table = torch.cat([angles, angles], -1)
        self.tokens = [(b, s) for b in range(batch) for s in range(length)]
        self.latent, self.turned = {}, {}
        for b, s in self.tokens:
            x = self.kv[b, 0, s].double()
            self.latent[b, s] = normed_by_loop(x[:LATENT], self.gamma.double())
            self.turned[b, s] = turned_by_loop(x[LATENT:], angles[b, 0, s].tolist())

    def run(self, index, rope, latent, mode, **options):
        inputs = [item.to("npu") for item in (self.kv, self.gamma, self.table.cos(), self.table.sin(), index)]
        return torch_npu.npu_kv_rmsnorm_rope_cache(*inputs, rope, latent, cache_mode=mode, **options)


def read(cache, slot, nz):
    """The token of a slot of a paged cache [blocks, block size, 1, size], number by number."""
    flat, size = cache.cpu().double().flatten(), cache.shape[-1]
    block, row = divmod(slot, BLOCK)
    if not nz:
        return flat[slot * size : (slot + 1) * size]
    places = [block * BLOCK * size + (i // 16) * BLOCK * 16 + row * 16 + i % 16 for i in range(size)]
    return flat[places]


def caches(*shape):
    return [torch.full((*shape, size), 99.0, device="npu") for size in (ROPE, LATENT)]


def untouched(cache):
    return int((cache == 99).sum()) // cache.shape[-1]


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=20)
@given(some.integers(1, 4), some.integers(1, 3), some.sampled_from(["PA", "PA_BNSD", "PA_NZ"]), some.integers(0, 99))
def test_every_token_goes_to_its_slot(batch, length, mode, seed):
    case, (rope, latent) = Case(batch, length, seed), caches(BLOCKS, BLOCK, 1)
    slots = torch.randperm(BLOCKS * BLOCK)[: batch * length]
    slots[0] = -1
    _, _, turned, normed = case.run(slots, rope, latent, mode, is_output_kv=True)
    for (b, s), slot in zip(case.tokens, slots.tolist(), strict=True):
        close(turned[b, 0, s].cpu(), case.turned[b, s])
        close(normed[b, 0, s].cpu(), case.latent[b, s])
        if slot >= 0:
            close(read(rope, slot, mode == "PA_NZ"), case.turned[b, s])
            close(read(latent, slot, mode == "PA_NZ"), case.latent[b, s])
    assert untouched(rope) == untouched(latent) == BLOCKS * BLOCK - batch * length + 1


@pytest.mark.parametrize("mode", ["PA_BLK_BNSD", "PA_BLK_NZ"])
def test_whole_blocks_go_to_their_places(mode):
    case, (rope, latent) = Case(2, BLOCK + 2, 0), caches(BLOCKS, BLOCK, 1)
    case.run(torch.tensor([3 * BLOCK, 0, -1, 4 * BLOCK]), rope, latent, mode)
    for start, first, count in ((3 * BLOCK, 0, BLOCK), (0, BLOCK, 2)):
        for offset in range(count):
            close(read(latent, start + offset, "NZ" in mode), case.latent[0, first + offset])
            close(read(rope, start + offset, "NZ" in mode), case.turned[0, first + offset])
    close(read(latent, 4 * BLOCK + 1, "NZ" in mode), case.latent[1, BLOCK + 1])
    assert untouched(rope) == BLOCKS * BLOCK - (BLOCK + 2) - 2


def test_block_modes_see_the_block_of_an_index_only():
    """Tokens given as sequences of length 1 all go to the first place of a block, whatever their slot in it."""
    case, (rope, latent) = Case(2, 1, 0), caches(BLOCKS, BLOCK, 1)
    case.run(torch.tensor([BLOCK + 2, 2 * BLOCK + 3]), rope, latent, "PA_BLK_NZ")
    close(read(latent, BLOCK, True), case.latent[0, 0])
    close(read(latent, 2 * BLOCK, True), case.latent[1, 0])


def test_plain_caches_are_written_by_position():
    case = Case(2, 2, 0)
    rope, latent = caches(2, 1, 6)
    case.run(torch.tensor([[4, 5], [0, -1]]), rope, latent, "Norm")
    for (b, s), place in zip(case.tokens, (4, 5, 0), strict=False):
        close(latent[b, 0, place].cpu(), case.latent[b, s])
        close(rope[b, 0, place].cpu(), case.turned[b, s])
    assert untouched(latent) == 12 - 3


def test_formats_differ_and_outputs_are_written_on_demand():
    case, plain, private = Case(3, 1, 0), caches(BLOCKS, BLOCK, 1), caches(BLOCKS, BLOCK, 1)
    slots = torch.tensor([1, 2, 7])
    _, _, turned, normed = case.run(slots, *plain, "PA")
    case.run(slots, *private, "PA_NZ")
    assert turned.isnan().all() and normed.isnan().all()
    assert not torch.equal(plain[1], private[1])


def test_unknown_modes_and_quantised_caches_rejected():
    case, (rope, latent) = Case(1, 1, 0), caches(BLOCKS, BLOCK, 1)
    with refused("aclnnKvRmsNormRopeCache: no such cache_mode NZ"):
        case.run(torch.tensor([0]), rope, latent, "NZ")
    with refused("aclnnKvRmsNormRopeCache: quantisation is not emulated"):
        case.run(torch.tensor([0]), rope, latent, "PA", c_kv_scale=case.gamma.to("npu"))
