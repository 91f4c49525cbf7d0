"""Every family has a small model, and its table lists the weights that transformers creates for that model."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from post_training.models.families import families, family_of, sizes_of, table_for
from tests.post_training.models.small_models import SMALL_MODELS


def differences(config, table):
    """Return the names of weights that are missing from the table or transformers, or whose shapes differ."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    real = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}
    return sorted(name for name in real.keys() | table.shapes.keys() if real.get(name) != table.shapes.get(name))


def without_small_model(known):
    """Return the families without a small model; those that Megatron does not train have their own tests."""
    trained = {family.name for family in known if "megatron" in family.trained_with}
    return trained - {family_of(make()).name for make in SMALL_MODELS.values()}


def test_every_family_has_one():
    assert without_small_model(families()) == set()
    assert without_small_model([*families(), replace(families()[0], name="Other")]) == {"Other"}


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_table_has_the_weights_of_transformers(name):
    config = SMALL_MODELS[name]()
    table = table_for(config)
    assert differences(config, table) == [] and table.layers == sizes_of(config.to_dict()).layers
    first, *others = table.shapes.items()
    assert differences(config, replace(table, shapes=dict(others))) == [first[0]]
