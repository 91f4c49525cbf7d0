from pathlib import Path

import pytest
from mypy import api

from overlay import DeclarationError, Feature, add, before_import, declaration, wrap
from tests.overlay.conftest import METADATA

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def forget_declarations(monkeypatch):
    monkeypatch.setattr(declaration, "_declared", [])


def test_a_decorator_records_the_patch_and_returns_the_function_itself():
    def body(upstream):
        return upstream()

    kept = wrap("acme.core:Class.method", **METADATA, relies_on=["acme.core:other"], after=["acme.core:first"])(body)

    (patch,) = declaration.declared()
    assert kept is body and patch.body is body
    assert (patch.kind, patch.name, patch.module) == ("wrap", "acme.core:Class.method", "acme.core")
    assert patch.qualified_name == "Class.method" and patch.label == "acme.core:Class.method@testing"
    assert patch.relies_on == ("acme.core:other",) and patch.after == ("acme.core:first",)
    assert "test_declaration" in patch.describe() and "feature testing" in patch.describe()


@pytest.mark.parametrize("target", ["acme.core", "acme:", ":name", "acme:a b", "acme:a:b", "acme.:a", "acme:a..b"])
def test_a_malformed_target_rejected(target):
    with pytest.raises(DeclarationError, match="package.module:Qualified.name"):
        wrap(target, **METADATA)


def test_a_module_kind_takes_a_module():
    with pytest.raises(DeclarationError, match="must be written package.module"):
        before_import("acme:name", **METADATA)


@pytest.mark.parametrize("key", ["feature", "why", "upstream", "remove_when"])
def test_missing_and_empty_metadata_rejected(key):
    incomplete = {name: value for name, value in METADATA.items() if name != key}
    with pytest.raises(DeclarationError, match=f"missing {key}"):
        add("acme:name", **incomplete)
    with pytest.raises(DeclarationError, match=f"missing {key}"):
        add("acme:name", **incomplete, **{key: "  "})


def test_patch_that_corrects_nothing_needs_no_link_and_no_end():
    """A patch has both or neither: a correction with a link must also say when it can go."""
    own = {name: value for name, value in METADATA.items() if name in ("feature", "why")}
    wrap("acme:name", **own)(lambda upstream: upstream())
    (patch,) = declaration.declared()
    assert patch.upstream == "not forwarded: part of this project's features"
    assert patch.remove_when == "never: it is part of this project's features"


def test_type_checker_notices_a_misspelt_field(tmp_path):
    program = tmp_path / "patches.py"
    program.write_text(
        "from overlay import Feature, wrap\n"
        "wrap('acme:name', feature=Feature('some', 'a test'), why='a reason', relies_in=['acme:other'])\n"
    )
    said = api.run(
        ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".cache" / "mypy"), str(program)]
    )
    assert 'Unexpected keyword argument "relies_in"' in said[0], said


def test_only_a_wrap_belongs_to_a_feature_that_can_be_off():
    feature = Feature("some", "a test", switch="some.enabled", is_on=lambda settings: settings.some)
    wrap("acme:name", **{**METADATA, "feature": feature})
    with pytest.raises(DeclarationError, match="feature some can be off, but only a wrap checks that at every call"):
        add("acme:name", **{**METADATA, "feature": feature})


def test_unknown_metadata_rejected():
    with pytest.raises(DeclarationError, match="unknown reason"):
        wrap("acme:name", **METADATA, reason="typo")
    with pytest.raises(DeclarationError, match="evidence must be one of"):
        wrap("acme:name", **METADATA, evidence="believed")
    with pytest.raises(DeclarationError, match="after must be a list"):
        wrap("acme:name", **METADATA, after="acme:first")
