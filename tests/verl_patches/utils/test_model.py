"""verl's models load from the folder that verl's own helper returns, at the cluster's commit and later."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.demonstrations.vllm_patches import module_with
from verl_patches.utils.model import load_megatron_gptmodel_weights

DEEPSEEK = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], initializer_range=0.02)
TABLE = SimpleNamespace(megatron=lambda placement, rank: "shards", shapes={})


class Node(dict):
    """A configuration node whose keys are also attributes."""

    __getattr__ = dict.__getitem__


def never(*args, **kwargs):
    raise AssertionError("upstream must not be called")


def at_the_pin(path):
    return f"copy of {path}"


def at_the_release(path, use_shm=False):
    return f"copy of {path}" + " in shared memory" * use_shm


def folder_read(
    copy_to_local, model: dict[str, object], load_from_hf: str | None = None, is_value_model: bool = False
) -> str:
    """Return the folder from which weights are read, with this `copy_to_local` of verl's."""
    read = mock.Mock()
    parts = {
        "post_training.models.families.table_for": mock.Mock(return_value=TABLE),
        "post_training.layouts.placements.train_placement": mock.Mock(),
        "post_training.layouts.model_tensors.train_tensors": mock.Mock(),
        "post_training.layouts.model_tensors.unwrapped": mock.Mock(),
        "post_training.checkpoint.loading.ignored_prefixes": mock.Mock(),
        "post_training.checkpoint.loading.load_from_huggingface": read,
        "verl_patches.features.settings.current": lambda: SimpleNamespace(load_from_hf=load_from_hf),
        "torch.distributed.get_rank": lambda: 0,
        "post_training.layouts.value_model.without_head": mock.Mock(),
        "verl_patches.features.critic.head.begin_head": mock.Mock(),
    }
    with module_with("verl.utils.fs", copy_to_local=copy_to_local), ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(mock.patch(name, part))
        config = SimpleNamespace(model=Node(model), megatron=SimpleNamespace(seed=1))
        load_megatron_gptmodel_weights(never, config, DEEPSEEK, ["chunk"], None, is_value_model)
    return read.call_args.args[0]


@pytest.mark.parametrize("model", [{}, {"use_shm": False}])
@pytest.mark.parametrize("copy_to_local", [at_the_pin, at_the_release])
def test_the_path_alone_is_handed_over_unless_shared_memory_is_asked_for(copy_to_local, model):
    assert folder_read(copy_to_local, {"path": "folder"} | model) == "copy of folder"


def test_shared_memory_is_asked_for_where_verl_has_it():
    model = {"path": "folder", "use_shm": True}
    assert folder_read(at_the_release, model) == "copy of folder in shared memory"
    with pytest.raises(TypeError, match="use_shm"):
        folder_read(at_the_pin, model)


@pytest.mark.parametrize("load_from_hf", [None, "actors_weights"])
def test_critic_reads_its_own_path(load_from_hf):
    """`actor.load_from_hf` is for the actor's weights; a critic may start from a reward model's."""
    found = folder_read(at_the_release, {"path": "critics"}, load_from_hf, is_value_model=True)
    assert found == "copy of critics"


def test_weights_of_their_own_are_not_copied():
    assert folder_read(never, {"path": "folder"}, load_from_hf="weights") == "weights"
