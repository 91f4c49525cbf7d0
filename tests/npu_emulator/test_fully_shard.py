"""FSDP2 of torch 2.5.1, which looks for streams in torch.cuda: it fails as it is, and works with transfer_to_npu."""

import pytest

from tests.forked import PYTORCH
from tests.ranks import run_ranks


@pytest.mark.slow
def test_fully_sharded_layers_train_as_the_whole_model(tmp_path):
    run_ranks("tests.npu_emulator.fully_shard_program", 2, tmp_path, imported=PYTORCH)
