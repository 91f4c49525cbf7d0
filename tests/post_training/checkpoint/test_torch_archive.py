"""Tensors located in files of torch.save equal those that torch loads."""

import pytest
import torch

from post_training.checkpoint.files import CheckpointError
from post_training.checkpoint.torch_archive import _STORAGES, read_archive
from post_training.checkpoint.training_files import read_whole


@pytest.mark.parametrize("dtype", list(_STORAGES), ids=str)
def test_views_of_one_storage_read_as_torch_loads_them(dtype, tmp_path):
    """Megatron's DDP keeps all parameters of a dtype in one buffer, and saves views of it."""
    buffer = (torch.arange(60) % 7 % 3).to(dtype)
    views = {
        "first": buffer[:12].view(3, 4),
        "middle": buffer[13:43].view(5, 6),
        "rows": buffer[20:50].view(5, 6)[2:4],
        "vector": buffer[43:58],
        "last": buffer[59:],
    }
    torch.save({"model": views}, tmp_path / "model.pt")
    expected = torch.load(tmp_path / "model.pt", weights_only=True)["model"]
    found = read_archive(tmp_path / "model.pt")["model"]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (dtype, tuple(tensor.shape))
        assert torch.equal(read_whole(found[name]), tensor), name


@pytest.mark.parametrize(
    "view", [lambda matrix: matrix.t(), lambda matrix: matrix[:, 1:]], ids=["transpose", "columns"]
)
def test_tensor_with_gaps_in_its_storage_rejected(view, tmp_path):
    torch.save({"model": {"weight": view(torch.arange(12.0).view(3, 4))}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is not contiguous in its storage"):
        read_archive(tmp_path / "model.pt")
