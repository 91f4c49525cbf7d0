"""docs/configuration.md is up to date with the settings and the schema, and has every key."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from overlay import Feature
from scripts.internal.document_configuration import document, feature_section, kind_of
from verl_patches.trainer.configuration_checks.names import known_keys

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


@dataclass(frozen=True)
class Limits:
    """`pages` is how many there are."""

    pages: int = field(default=3, metadata={"at_least": 1})


@dataclass(frozen=True)
class Settings:
    """Its purpose."""

    enabled: bool = True
    limits: Limits = field(default_factory=Limits)


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text() == document(), "run `python -m overlay update`"


def test_every_key_that_is_known_stands_in_it():
    text = DOCUMENT.read_text()
    groups = {key.rpartition(".")[0] for key in known_keys()}
    missing = [key for key in known_keys() if f"`{key}`" not in text and key not in groups]
    assert [key for key in missing if not any(each.startswith(f"{key}.") for each in known_keys())] == []


def test_new_key_detected():
    feature = Feature(name="pages", purpose="It counts.", section="a.pages", settings=Settings)
    text = "\n".join(feature_section(feature))
    assert "| `a.pages.limits.pages` | int | `3` | at least 1 |" in text
    assert "It counts." in text and "Its purpose." in text and "`pages` is how many there are." in text
    assert "a.pages.enabled" not in DOCUMENT.read_text()


@pytest.mark.parametrize(
    "annotation, words",
    [
        (Annotated[int, Field(ge=1, le=2**31 - 1)] | None, ("int or null", "at least 1")),
        (Annotated[float, Field(gt=0, le=1)], ("float", "above 0, at most 1")),
        (Literal["a", "b"], ("text", "`a`, `b`")),
        (list[Annotated[str, Field(min_length=1)]], ("list of text", "not empty")),
    ],
)
def test_types_and_ranges_are_put_into_words(annotation, words):
    assert kind_of(annotation) == words
