from types import SimpleNamespace

import pytest

from vllm_patches.v1.core.kv_cache_utils import get_num_blocks


@pytest.mark.parametrize(("wanted", "made"), [(7, 7), (1000, 100)])
def test_the_override_counts_as_far_as_memory_goes(wanted, made):
    config = SimpleNamespace(cache_config=SimpleNamespace(num_gpu_blocks_override=wanted))
    assert get_num_blocks(lambda config, layers, memory, page: memory // page // layers, config, 2, 2000, 10) == made
