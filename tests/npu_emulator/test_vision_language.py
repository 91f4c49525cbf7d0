"""Qwen2.5-VL on the emulated NPU equals transformers on the CPU: training, rollout and new weights."""

import json

import pytest

from tests.vllm_process import run_vllm

pytestmark = pytest.mark.slow
SMALL = 1e-5
SIZES = (1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the results of engines of both sizes."""
    made = tmp_path_factory.mktemp("images")
    run_vllm("tests.npu_emulator.vision_language_program", made, *map(str, SIZES))
    return made


@pytest.mark.parametrize("ranks", SIZES)
def test_tokens_of_images_equal_transformers(folder, ranks):
    found = [json.loads((folder / f"{ranks}.{rank}.json").read_text()) for rank in range(ranks)]
    for weights in ("0", "1"):
        first = found[0][weights]
        assert first["equal"] == first["of"] == 60 and first["prompts"] == 5
        assert first["worst"] < SMALL
        assert [each[weights]["differing"] for each in found] == [[]] * ranks and first["weights"] > 50
