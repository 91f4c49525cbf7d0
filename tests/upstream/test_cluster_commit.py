"""The lists of names that the cluster's commit of verl lacks agree with its checkout."""

from importlib.util import find_spec
from pathlib import Path

from tests.verl_patches.trainer.cluster_commit import ABSENT_KEYS, ABSENT_MEMBERS, absent_keys, absent_members

ROOT = Path(__file__).resolve().parents[2]


def test_the_lists_are_those_of_the_checkout(upstream):
    release, commit = Path(find_spec("verl").submodule_search_locations[0]), upstream / "verl" / "verl"
    assert {file: absent_keys(file, release, commit) for file in ABSENT_KEYS} == ABSENT_KEYS
    assert absent_members(ROOT / "verl_patches", release, commit) == ABSENT_MEMBERS
