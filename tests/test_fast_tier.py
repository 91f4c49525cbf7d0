"""The fast tier: which tests it includes and excludes, and that no folder is excluded entirely."""

import json
from types import SimpleNamespace

from tests import fast_tier
from tests.fast_tier import (
    LEFT_OUT,
    MOST_SECONDS_OF_A_FILE,
    NEEDS_CHECKOUTS,
    ROOT,
    Unmeasured,
    folder_of,
    measured,
    merge,
    split,
    taken_files,
)


def item(file: str, *markers: str) -> SimpleNamespace:
    return SimpleNamespace(path=ROOT / file, get_closest_marker=lambda name: name if name in markers else None)


def test_what_is_slow_or_dear_or_needs_checkouts_is_left_out():
    cheap, dear, new = "tests/overlay/test_a.py", "tests/overlay/test_b.py", "tests/overlay/test_new.py"
    seconds = {cheap: MOST_SECONDS_OF_A_FILE, dear: MOST_SECONDS_OF_A_FILE + 0.1}
    items = [item(cheap), item(dear), item(new), item("tests/upstream/test_c.py")]
    items += [item(cheap, name) for name in LEFT_OUT]
    chosen, others = split(items, seconds)
    assert chosen == [items[0], items[2]] and others == [items[1], *items[3:]]


def all_files() -> set[str]:
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")}
    return {file for file in files if folder_of(file) != NEEDS_CHECKOUTS}


def test_the_tier_takes_two_and_a_half_minutes_of_two_processors_at_most():
    """The total includes the time that three processes take to import and collect everything."""
    seconds, collecting = measured(), 3 * 30
    assert len(seconds) > 200 and sum(seconds[file] for file in taken_files(seconds, seconds)) + collecting < 2 * 150


def test_every_folder_has_tests_in_the_tier():
    folders = {folder_of(file) for file in all_files()} - {None}
    assert {folder_of(file) for file in taken_files(all_files(), measured())} - {None} == folders and len(folders) > 10


def test_folder_of_expensive_tests_gives_its_cheapest():
    files = ["tests/overlay/test_a.py", "tests/overlay/test_b.py", "tests/scripts/test_c.py", "tests/test_d.py"]
    assert taken_files(files, {files[0]: 100.0, files[1]: 50.0, files[3]: 50.0}) == {files[1], files[2]}


def test_what_was_measured_is_still_there():
    assert [file for file in measured() if not (ROOT / file).is_file()] == []


def test_what_two_processes_measured_is_put_together(tmp_path):
    durations, (one, other, third) = (
        tmp_path / "durations.json",
        ("tests/conftest.py", "tests/ranks.py", "tests/worker_processes"),
    )
    durations.write_text(json.dumps({one: 100.0, other: 2.0, "tests/test_that_is_gone.py": 3.0}))
    merge(durations, {one: 1.04})
    merge(durations, {third: 7.0})
    assert json.loads(durations.read_text()) == {one: 1.0, other: 2.0, third: 7.0}


def test_files_without_an_entry_are_measured_alone(monkeypatch):
    known, new = "tests/overlay/test_pins.py", "tests/overlay/test_new.py"
    monkeypatch.setattr(fast_tier, "measured", lambda: {known: 1.0})
    slow = "tests/overlay/test_slow.py"
    items, deselected = [item(known), item(new), item(slow, "slow")], []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)))
    Unmeasured().pytest_collection_modifyitems(config, items)
    names = [[each.path.name for each in some] for some in (items, deselected)]
    assert names == [["test_new.py"], ["test_pins.py", "test_slow.py"]]
