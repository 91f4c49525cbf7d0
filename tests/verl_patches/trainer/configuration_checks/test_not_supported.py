"""Every key of docs/not-supported.md is rejected with a helpful sentence, and the documented alternative passes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.post_training.plan.test_fsdp import NAMED, NAMES, QWEN
from tests.scripts.cluster_files import ROOT
from verl_patches.trainer.configuration_checks import ConfigurationError, check_configuration
from verl_patches.trainer.configuration_checks.handed_over import ENGINE, NOT_SUPPORTED
from verl_patches.trainer.configuration_checks.schema.values import PAGE
from verl_patches.trainer.main_ppo import compose

MODEL = NAMED | dict(zip(NAMES, QWEN["1.5B"][0], strict=True))
SETTING = re.compile(r"`(\+?[a-z][\w.]+=[^`]*)`")


def rows(page: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a page's first table."""
    table = re.search(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    for line in table[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def settings(column: int, page: str = PAGE) -> list[str]:
    return [setting for row in rows(page) for setting in SETTING.findall(row[column])]


def check(setting: str) -> None:
    """Check the setting in the job on FSDP or on Megatron, whichever has the key."""
    path = "actor_rollout_ref.model.path=/model"
    if "megatron" in setting:
        check_configuration(compose("rehearsal", [path, setting]), None)
    else:
        check_configuration(compose("qwen2_5_1_5b_math_one_card", [path, setting]), MODEL)


@pytest.mark.parametrize("setting", settings(1))
def test_key_of_the_page_is_rejected_with_a_remedy(setting):
    with pytest.raises(ConfigurationError) as caught:
        check(setting)
    said = str(caught.value)
    key = setting.lstrip("+").partition("=")[0]
    assert key in said and "\n" not in said and len(said) < 500
    remedies = rf"{re.escape(PAGE)}|; remove it( and set \S+)?$|instead|write \S+=|is called \S+|[Ss]et it to"
    assert re.search(remedies, said), said


@pytest.mark.parametrize("setting", settings(3))
def test_setting_to_use_instead_passes(setting):
    check(setting)


def test_keys_are_the_same_in_both_languages():
    chinese = PAGE.replace(".md", ".zh.md")
    assert settings(1) == settings(1, chinese) and settings(3) == settings(3, chinese)
    assert len(settings(1)) > 40


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_argument_of_the_engine_is_rejected_and_named_on_the_page(name):
    """Values that change nothing pass, like vLLM's own default."""
    assert f"{ENGINE}.{name}=" in (ROOT / PAGE).read_text()
    for harmless in (*NOT_SUPPORTED[name][0], "null"):
        check(f"+{ENGINE}.{name}={harmless}")
    with pytest.raises(ConfigurationError, match=rf"{name}=.* is invalid: .*Remove it; see {PAGE}"):
        check(f"+{ENGINE}.{name}=other")
