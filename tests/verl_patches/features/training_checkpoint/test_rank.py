"""What ranks agree on before a checkpoint: the updates that an optimizer has made."""

from types import SimpleNamespace

import pytest

from post_training.checkpoint.files import CheckpointError
from verl_patches.features.training_checkpoint.rank import common_steps


@pytest.mark.parametrize(("steps", "common"), [([], 0), ([0], 0), ([3], 3), ([3, 3, 3], 3)])
def test_shards_have_had_the_same_number_of_updates(steps, common):
    assert common_steps(SimpleNamespace(steps=each) for each in steps) == common


def test_other_numbers_of_updates_are_refused_with_all_of_them():
    with pytest.raises(CheckpointError, match=r"different numbers of updates: \[2, 3, 10\]$"):
        common_steps([SimpleNamespace(steps=each) for each in (10, 2, 3, 2)])
