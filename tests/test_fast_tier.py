"""The fast tier: what it takes, what it leaves out, and that no room is left out whole."""

import json
from pathlib import Path
from types import SimpleNamespace

from tests.fast_tier import LEFT_OUT, MOST_SECONDS_OF_A_FILE, ROOT, measured, merge, split

# The room that tests of checkouts are for is the workspace's, which a fast run cannot have.
NEEDS_CHECKOUTS = "upstream"


def item(file: str, *markers: str) -> SimpleNamespace:
    return SimpleNamespace(path=ROOT / file, get_closest_marker=lambda name: name if name in markers else None)


def rooms_left_out(files: list[str], seconds: dict[str, float]) -> set[str]:
    """Folders of tests of which no file is cheap enough."""
    chosen, _ = split([item(file) for file in files], seconds)
    taken = {each.path.relative_to(ROOT).parts[1] for each in chosen}
    return {Path(file).parts[1] for file in files} - taken - {NEEDS_CHECKOUTS}


def test_what_is_slow_or_dear_or_needs_checkouts_is_left_out():
    cheap, dear, new = "tests/overlay/test_a.py", "tests/overlay/test_b.py", "tests/overlay/test_new.py"
    seconds = {cheap: MOST_SECONDS_OF_A_FILE, dear: MOST_SECONDS_OF_A_FILE + 0.1}
    items = [item(cheap), item(dear), item(new), item("tests/upstream/test_c.py")]
    items += [item(cheap, name) for name in LEFT_OUT]
    chosen, others = split(items, seconds)
    assert chosen == [items[0], items[2]] and others == [items[1], *items[3:]]


def test_the_tier_takes_three_minutes_of_two_processors_at_most():
    taken = [seconds for file, seconds in measured().items() if seconds <= MOST_SECONDS_OF_A_FILE]
    assert len(taken) > 100 and sum(taken) < 2 * 180


def test_every_room_has_tests_in_the_tier():
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")]
    assert rooms_left_out(files, measured()) == set()


def test_a_room_whose_tests_are_all_dear_is_noticed():
    files = ["tests/overlay/test_a.py", "tests/scripts/test_b.py"]
    assert rooms_left_out(files, {files[0]: 100.0}) == {"overlay"}


def test_what_was_measured_is_still_there():
    assert [file for file in measured() if not (ROOT / file).is_file()] == []


def test_what_two_processes_measured_is_put_together(tmp_path):
    durations, (one, other, third) = tmp_path / "durations.json", ("tests/conftest.py", "tests/ranks.py", "tests/rig")
    durations.write_text(json.dumps({one: 100.0, other: 2.0, "tests/test_that_is_gone.py": 3.0}))
    merge(durations, {one: 1.04})
    merge(durations, {third: 7.0})
    assert json.loads(durations.read_text()) == {one: 1.0, other: 2.0, third: 7.0}
