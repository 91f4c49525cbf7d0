"""Which groups are kept, checked against every combination; and the size of a generation batch."""

import math
from itertools import product

import numpy
import pytest

from verl_patches.features.dynamic_sampling.acceptance import Acceptance
from verl_patches.features.dynamic_sampling.groups import qualifies

NAN = math.nan


def upstreams(values):
    """Evaluate the condition of verl's recipe, which has no bounds."""
    return bool(numpy.std(values) > 0) or len(values) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_every_group_of_finite_values_is_kept_where_verls_recipe_keeps_it(n):
    for values in product((0.0, 0.5, 1.0), repeat=n):
        assert qualifies(values) == upstreams(values)
        for lower, upper in product((None, 0.25, 0.5), (None, 0.5, 0.75)):
            inside = (lower is None or numpy.mean(values) >= lower) and (upper is None or numpy.mean(values) <= upper)
            assert qualifies(values, lower, upper) == (upstreams(values) and inside)


@pytest.mark.parametrize("values", [[NAN], [NAN, NAN], [0, NAN], [0, 1, NAN], [math.inf, 0], [-math.inf]])
def test_a_value_that_is_not_finite_spoils_its_group(values):
    assert not qualifies(values)


def test_equal_values_whose_standard_deviation_is_not_exactly_0_are_equal():
    values = [0.1] * 3
    assert numpy.std(values) > 0 and not qualifies(values)


def test_a_wave_is_as_large_as_the_acceptance_asks_for():
    acceptance = Acceptance()
    assert acceptance.gen_batch_size(32, 4, 512) == 32, "nothing is known: a prompt for each that is missing"
    acceptance.begin_step()
    acceptance.count(63, 31)
    assert (
        acceptance.rate == 0.5
        and acceptance.gen_batch_size(20, 4, 512) == 40
        and acceptance.gen_batch_size(19, 4, 512) == 40
    )
    assert acceptance.gen_batch_size(32, 4, 48) == 48
    acceptance.begin_step()
    assert acceptance.rate == 0.5, "the last step still counts"
    acceptance.count(64, 0)
    assert acceptance.gen_batch_size(32, 4, 512) == 128
    acceptance.begin_step()
    acceptance.count(0, 0)
    assert acceptance.rate == 1 / 65 and acceptance.gen_batch_size(8, 4, 512) == 512, "0 accepted is no division by 0"
    assert Acceptance.of(acceptance.state_dict()) == acceptance
