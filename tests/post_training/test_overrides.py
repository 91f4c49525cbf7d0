"""Writing overrides as text: Hydra's own parser reads the same path back."""

import subprocess
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from post_training.overrides import quoted, setting, with_absolute_path

ROOT = Path(__file__).parents[2]
PATHS = [
    "/plain/path-1.0",
    "/with space/a=b,{c}/it's",
    "/测试/目录",
    r"/a\b",
    r"/a\'b",
    "/ends with\\",
    r"/two\\b",
    '/a]b[c#"d"&|$x;%e9\'',
]


def read_back(text: str) -> object:
    return OverridesParser.create().parse_override(f"key={text}").value()


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_path_survives_hydras_grammar(path):
    assert read_back(quoted(path)) == path


@pytest.mark.parametrize("path", PATHS)
def test_the_launchers_shell_quotes_alike(path):
    script = 'source "$1/scripts/lib/settings.sh"; settings_quoted "$2"'
    printed = subprocess.run(["bash", "-c", script, "quote", ROOT, path], capture_output=True, text=True, check=True)
    assert read_back(printed.stdout) == path


def test_settings_hold_values_paths_and_lists_of_paths():
    assert setting("a.b", 3) == "a.b=3" and setting("a", "x") == "a=x"
    assert read_back(setting("key", Path("/a b")).removeprefix("key=")) == "/a b"
    listed = OverridesParser.create().parse_override(setting("key", [Path("/a b"), Path("/测,试"), Path("/c")]))
    assert [getattr(entry, "text", entry) for entry in listed._value] == ["/a b", "/测,试", "/c"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor_rollout_ref.model.path=models/qwen", "actor_rollout_ref.model.path={here}/models/qwen"),
        ("+critic.model.path='my models/qwen'", "+critic.model.path='{here}/my models/qwen'"),
        ("trainer.default_local_dir=out", "trainer.default_local_dir={here}/out"),
        ("data.train_files=[a.parquet,'/b.parquet',\"c,d.parquet\"]",
         "data.train_files=[{here}/a.parquet,/b.parquet,'{here}/c,d.parquet']"),
        ("data.val_files=test.parquet", "data.val_files={here}/test.parquet"),
    ],
)  # fmt: skip
def test_relative_paths_count_from_the_users_folder(tmp_path, monkeypatch, override, expected):
    monkeypatch.chdir(tmp_path)
    assert with_absolute_path(override) == expected.format(here=tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.path=/models/qwen/",
        "actor_rollout_ref.model.path=~/models/qwen",
        "actor_rollout_ref.model.path=hdfs://host/models/qwen",
        "critic.model.path=${actor_rollout_ref.model.path}",
        "trainer.resume_from_path=null",
        r"trainer.default_local_dir=lr\=1e-6",
        "actor_rollout_ref.actor.profile.use_profile=false",
        "data.train_files=[]",
        "trainer.default_local_dir=",
        "~trainer.default_local_dir",
        "trainer.logger=[console]",
    ],
)
def test_other_overrides_stay_as_they_are(override):
    assert with_absolute_path(override) == override
