import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay import ConflictError
from overlay.ordering import make_plan


def nothing(*_):
    return None


def labels(plan):
    return [patch.label for patch in plan.patches]


def test_files_decide_where_nothing_else_does(bench):
    patches = [bench.patch("wrap", f"acme:f{index}", nothing) for index in range(3)]
    assert labels(make_plan(patches)) == [patch.label for patch in patches]


def test_after_is_obeyed_by_name_and_by_label(bench):
    last = bench.patch("wrap", "acme:f", nothing, feature="last", after=["acme:f@middle"])
    middle = bench.patch("wrap", "acme:f", nothing, feature="middle", after=["acme:g"])
    first = bench.patch("wrap", "acme:g", nothing)
    for order in itertools.permutations([last, middle, first]):
        assert labels(make_plan(order)) == [first.label, middle.label, last.label]


def test_outside_and_inside_say_how_wraps_of_one_target_are_nested(bench):
    outer = bench.patch("wrap", "acme:f", nothing, feature="outer", outside=["middle"])
    middle = bench.patch("wrap", "acme:f", nothing, feature="middle")
    inner = bench.patch("wrap", "acme:f", nothing, feature="inner", inside=["middle"])
    elsewhere = bench.patch("wrap", "acme:g", nothing, feature="middle")
    for order in itertools.permutations([outer, middle, inner, elsewhere]):
        found = [label for label in labels(make_plan(order)) if label.startswith("acme:f")]
        assert found == [inner.label, middle.label, outer.label]


@pytest.mark.parametrize("word", ["outside", "inside"])
def test_a_neighbour_that_has_no_patch_of_the_target_is_a_conflict(bench, word):
    lonely = bench.patch("wrap", "acme:f", nothing, **{word: ["other"]})
    with pytest.raises(ConflictError, match=f"has {word}='other', but no patch of this target belongs to that feature"):
        make_plan([lonely, bench.patch("wrap", "acme:g", nothing, feature="other")])


def test_what_makes_a_target_comes_before_what_changes_it(bench):
    member = bench.patch("wrap", "acme:Class.method", nothing)
    outer = bench.patch("wrap", "acme:f", nothing)
    made = bench.patch("add", "acme:Class", nothing)
    replaced = bench.patch("replace", "acme:f", nothing)
    plan = make_plan([member, outer, made, replaced])
    assert labels(plan).index(made.label) < labels(plan).index(member.label)
    assert plan.patches.index(replaced) < plan.patches.index(outer)


def test_all_conflicts_are_reported_together(bench):
    with pytest.raises(ConflictError) as caught:
        make_plan(
            [
                bench.patch("replace", "acme:f", nothing, feature="one"),
                bench.patch("replace", "acme:f", nothing, feature="two"),
                bench.patch("add", "acme:g", nothing, feature="one"),
                bench.patch("add", "acme:g", nothing, feature="two"),
                bench.patch("wrap", "acme:h", nothing),
                bench.patch("wrap", "acme:h", nothing),
                bench.patch("wrap", "acme:i", nothing, after=["acme:typo"]),
            ]
        )
    text = str(caught.value)
    assert text.count("both define the target") == 2
    assert "same feature on the same target" in text
    assert "after='acme:typo', which names no patch" in text


def test_add_and_replace_of_one_target_conflict(bench):
    with pytest.raises(ConflictError, match="both define the target"):
        make_plan([bench.patch("add", "acme:f", nothing), bench.patch("replace", "acme:f", nothing)])


def test_a_cycle_rejected_and_named(bench):
    with pytest.raises(ConflictError, match="cycle: acme:f@testing, acme:g@testing"):
        make_plan(
            [
                bench.patch("wrap", "acme:f", nothing, after=["acme:g"]),
                bench.patch("wrap", "acme:g", nothing, after=["acme:f"]),
                bench.patch("wrap", "acme:h", nothing),
            ]
        )


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 9), max_size=3)), max_size=10))
def test_the_order_respects_every_edge_and_is_the_same_each_time(shape):
    from tests.overlay.conftest import Workbench

    bench = Workbench(None)
    patches = []
    for index, (target, after) in enumerate(shape):
        names = [f"acme:f{shape[other][0]}@f{other}" for other in after if other < index]
        patches.append(bench.patch("wrap", f"acme:f{target}", nothing, feature=f"f{index}", after=names))
    plan = make_plan(patches)
    position = {patch.label: index for index, patch in enumerate(plan.patches)}
    assert plan == make_plan(patches)
    for index, patch in enumerate(plan.patches):
        assert all(position[name] < index for name in patch.after)
        assert all(before < index for before in plan.predecessors[index])
    for same in range(5):
        chain = [index for index, patch in enumerate(plan.patches) if patch.target == f"acme:f{same}"]
        assert all(earlier in plan.predecessors[later] for earlier, later in itertools.pairwise(chain))
