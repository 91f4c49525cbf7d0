"""Unmodified vLLM 0.23 with vLLM-Ascend 0.23 generates from images what transformers generates on the CPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu_emulator.vision_language_program import TOKENS
from tests.stack_2026.vllm_ascend.images_program import CASES, PROMPTS, WIDE
from tests.stack_2026.vllm_ascend.program import CAPTURED_SIZES
from tests.vllm_process import run_vllm

pytestmark = pytest.mark.slow
SMALL = 1e-5
TABLE_OF_POSITIONS = "aclnnRopeWithSinCosCache"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("images")
    run_vllm("tests.stack_2026.vllm_ascend.images_program", folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_images_equal_transformers(found, name):
    for kind in ("first", "again"):
        compared = found[name][kind]
        assert (compared["equal"], compared["of"], compared["prompts"]) == (TOKENS * PROMPTS, TOKENS * PROMPTS, PROMPTS)
        assert compared["worst"] < SMALL


@pytest.mark.parametrize("name", CASES)
def test_other_images_and_positions_of_text_show(found, name):
    assert found[name]["other images"] > 1000 * SMALL and found[name]["positions of text"] > 100 * SMALL


@pytest.mark.parametrize("name", CASES)
def test_layout_of_alltoallv_finds_the_weights_that_vllm_loaded(found, name):
    """Compare bit for bit on each rank, vision tower included; the layout names all weights of the file."""
    assert found[name]["differing"] == [] and found[name]["unplaced"] == []
    assert found[name]["elements"] == 0


@pytest.mark.parametrize("name", CASES)
def test_graphs_are_captured_and_kernels_called(found, name):
    results, case = found[name], CASES[name]
    assert (results["captured"] >= len(CAPTURED_SIZES)) == (case.graph != "eager") == (results["replayed"] > TOKENS)
    assert any(operator.startswith(TABLE_OF_POSITIONS) for operator in results["operators"]) == (case.model == WIDE)
    assert (results["freed in sleep"] > 16 << 20) == case.sleeps
