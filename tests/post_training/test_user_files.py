"""User-supplied files: any bad file yields one sentence that names it, quickly and in bounded memory."""

import json
import os
import resource

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from post_training.recovery.policy import PolicyError, read_policy
from post_training.user_files import (
    DEEPEST,
    FileError,
    parse_json,
    read_bytes,
    read_json,
    read_lines,
    read_object,
    read_text,
    read_yaml,
)

READERS = (read_bytes, read_text, read_json, read_object, read_yaml, lambda path: list(read_lines(path, 3)))


@pytest.fixture
def loop(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path / "loop"


@pytest.mark.parametrize("read", READERS)
def test_other_kinds_of_files_rejected(read, tmp_path, loop):
    os.mkfifo(tmp_path / "pipe")
    paths = [tmp_path / "pipe", tmp_path, loop, tmp_path / "missing", tmp_path / ("a" * 300)]
    for path in [*paths, type(tmp_path)("/dev/zero"), type(tmp_path)("/dev/stdin")]:
        with pytest.raises(FileError) as caught:
            read(path)
        assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, read_yaml])
def test_file_above_limit_rejected_without_reading(read, tmp_path):
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(1 << 42)  # sparse
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match="has more than 1,000 bytes"):
        read(huge, 1000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64_000  # KB


def test_first_lines_of_long_file_read_alone(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_bytes("\ufeff{}\n\n".encode() + b"[1]\n" * 3 + b"\xff")
    assert list(read_lines(path, 3)) == ["{}", "[1]", "[1]"]
    with pytest.raises(FileError, match="first 1 lines have more than 2 bytes"):
        list(read_lines(path, 1, 2))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 20_000, "nested too deeply"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested too deeply"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ("1" * 6000, "not JSON"),
        ("{", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_bad_json_rejected(text, reason, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileError, match=reason):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 20_000, "nested deeper than"),
        ("a: " + "1" * 6000, "not YAML"),
        ("a: 2020-99-99", "not YAML"),
        ("a: 1\nb: 2\na: 3", "line 3 has the key 'a' a second time"),
        ("a: &x [1]\nb: *x", r"line 2 has the alias \*x"),
        ("? [a]\n: 1", "not YAML"),
        ("a: !!python/object/apply:os.system [ls]", "not YAML"),
        ("a: !!int x", "not YAML"),
        ("\x00", "not YAML"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_yaml_rejected(text, reason, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError, match=reason):
        read_yaml(file)
    with pytest.raises(PolicyError, match="^--policy "):
        read_policy(file)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAIN)
def test_good_documents_read_as_their_own_readers_do(tmp_path, content):
    """Compare with json and PyYAML's safe_load."""
    assert parse_json(json.dumps(content), "here") == content
    file = tmp_path / "a.yaml"
    text = yaml.safe_dump(content, allow_unicode=True)
    file.write_text(text, encoding="utf-8", newline="")
    if "*id" not in text:
        assert read_yaml(file) == yaml.safe_load(text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.text(alphabet="{}[]:,&*?!|>-'\"\\ \n\t09aeé.~#%@`", max_size=200).map(str.encode))
@example(b"a: !!timestamp 9999-99-99")
@example(b"!!binary =")
@example(b"<<: 1")
@example(b"{a: {<<: [1]}}")
@example(b"!!float x")
def test_any_bytes_read_or_rejected_in_one_sentence(tmp_path, content):
    file = tmp_path / "a"
    file.write_bytes(content)
    for read in READERS:
        try:
            read(file)
        except FileError as error:
            assert str(error).startswith(str(file)) and "\n" not in str(error)
