"""Model FLOPs match the published number of activated parameters and verl's own counter."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from post_training.report.flops import A3_PEAKS, PEAK, UnknownModelError, forward_flops, utilisation
from post_training.report.published import DEEPSEEK_V3, RANDOM_WEIGHTS, TRUE_WEIGHTS

PUBLISHED = Path(__file__).parents[1] / "plan" / "deepseek_v3_config.json"
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}
TOKENS = 1000


def counted_by_verl(model: dict, lengths: list[int]) -> float:
    """Return verl's FLOPs of a forward and a backward pass over sequences of these lengths."""
    counter = pytest.importorskip("verl.utils.flops_counter").FlopsCounter(SimpleNamespace(**model))
    return counter.estimate_func[model["model_type"]](sum(lengths), lengths, 1.0) * 1e12


def test_the_model_that_the_published_rows_ran_is_deepseek_v3():
    published = json.loads(PUBLISHED.read_text())
    assert {name: published[name] for name in DEEPSEEK_V3} == DEEPSEEK_V3


def test_a_token_of_deepseek_v3_meets_37_billion_weights():
    """Compare with the abstract of DeepSeek-V3, arXiv:2412.19437: 37B activated per token, embeddings included."""
    looked_up = DEEPSEEK_V3["hidden_size"] * DEEPSEEK_V3["vocab_size"]
    assert (forward_flops(DEEPSEEK_V3, 1e-6) / 2e-6 + looked_up) / 1e9 == pytest.approx(37.5, abs=0.5)


@pytest.mark.parametrize(("model", "widths"), [(DEEPSEEK_V3, (192, 128)), (QWEN2, (64, 64))])
def test_it_is_verls_count_but_for_embeddings_and_the_causal_half_of_attention(model, widths):
    """verl also counts the embedding, and all pairs of tokens, with the query's width for the value too."""
    ours, verls = 3 * forward_flops(model, TOKENS), counted_by_verl(dict(model), [TOKENS])
    embedding = 6 * model["vocab_size"] * model["hidden_size"] * TOKENS
    pairs = model["num_hidden_layers"] * model["num_attention_heads"] * TOKENS**2
    attention = (12 * widths[0] - 3 * sum(widths)) * pairs
    assert ours == pytest.approx(verls - embedding - attention, rel=1e-9)


def test_utilisation_is_work_over_what_the_dies_could_have_done():
    statistics = TRUE_WEIGHTS.statistics
    work = 3 * 8192 * forward_flops(DEEPSEEK_V3, 77.8 + 1576.6)
    assert utilisation(DEEPSEEK_V3, statistics, 256, 376) == pytest.approx(work / 319.3 / 256 / 376e12)
    assert utilisation(DEEPSEEK_V3, statistics, 256, 188) == pytest.approx(
        2 * utilisation(DEEPSEEK_V3, statistics, 256, 376)
    )
    # Rounded: 6 x 36.6e9 weights x 25.5e6 tokens / 328.8 s / 256 dies is 67 TFLOPS, and attention adds 10 %.
    assert utilisation(DEEPSEEK_V3, RANDOM_WEIGHTS.statistics, 256, 376) == pytest.approx(
        67e12 * 1.1 / 376e12, rel=0.02
    )


def test_every_peak_of_the_a3_names_who_says_so():
    assert PEAK is A3_PEAKS[0] and all(peak.source and 250 < peak.teraflops < 420 for peak in A3_PEAKS)


def test_a_model_without_a_formula_is_named():
    with pytest.raises(UnknownModelError, match="no formula for models of type 'gpt2'"):
        forward_flops({"model_type": "gpt2"}, 1)
    with pytest.raises(UnknownModelError, match="lacks 'num_hidden_layers'"):
        forward_flops({"model_type": "qwen2"}, 1)
