"""docs/weight_types.md is up to date with its generator, and has the tensors that stay float32."""

from pathlib import Path

from scripts.internal import document_types

PAGE = Path(__file__).parents[2] / "docs" / "weight_types.md"


def test_page_is_what_the_generator_prints(capsys):
    assert document_types.main() == 0
    assert PAGE.read_text(encoding="utf-8") == capsys.readouterr().out


def test_router_biases_are_float32_everywhere():
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "e_score_correction_bias" in line]
    assert row.startswith("| DeepSeek-V3 |") and row.count("float32") == 7 and "bfloat16" not in row
