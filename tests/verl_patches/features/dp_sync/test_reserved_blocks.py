"""How many tokens ahead a sync window lets vLLM's scheduler allocate blocks."""

from types import SimpleNamespace

import pytest

from verl_patches.features.dp_sync.decode_loop import _reserving


def scheduler(blocks: int) -> SimpleNamespace:
    pool = SimpleNamespace(num_gpu_blocks=blocks)
    return SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool), block_size=16, max_model_len=64, num_lookahead_tokens=1
    )


# Four blocks of 16 hold the longest sequence, and vLLM keeps one more for itself.
@pytest.mark.parametrize(("blocks", "ahead"), [(5, 7), (4, 0), (100, 7)])
def test_blocks_are_reserved_where_the_cache_holds_the_longest_sequence(blocks, ahead):
    one = scheduler(blocks)
    with _reserving(one, 8):
        assert one.num_lookahead_tokens == 1 + ahead
    assert one.num_lookahead_tokens == 1


def test_nothing_stays_reserved_after_a_failure():
    one = scheduler(100)
    with pytest.raises(KeyError), _reserving(one, 8):
        raise KeyError
    assert one.num_lookahead_tokens == 1
