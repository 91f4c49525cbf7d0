"""Which sampling parameters, other than the temperature, change what the rollout draws from."""

import pytest

from verl_patches.features.temperature.feature import narrowed_by

PLAIN = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
         "repetition_penalty": 1.0}  # fmt: skip


@pytest.mark.parametrize("name, value", [("top_k", 1), ("top_k", 50), ("top_p", 0.95), ("min_p", 0.1),
                                         ("presence_penalty", -0.5), ("frequency_penalty", 0.2),
                                         ("repetition_penalty", 1.1)])  # fmt: skip
def test_each_parameter_that_narrows_is_named_with_its_default(name, value):
    assert narrowed_by(PLAIN | {name: value}) == {name: (value, PLAIN[name])} == narrowed_by({name: value})


@pytest.mark.parametrize(
    "given", [{}, PLAIN, dict.fromkeys(PLAIN), {"top_k": 0}, {"temperature": 0.5, "n": 8}, {"top_p": 1}]
)
def test_whole_vocabulary_is_drawn_from(given):
    assert narrowed_by(given) == {}
