"""Log-probs that vLLM's patched sampler reports match the frequencies of 100,000 of its draws."""

import importlib.util
import inspect
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")
pytest.importorskip("vllm")
from vllm.sequence import Logprob  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.ops import topk_topp_sampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402

from tests.demonstrations import installed  # noqa: E402
from verl_patches.features import settings  # noqa: E402
from verl_patches.features.temperature.feature import TemperatureSettings  # noqa: E402
from verl_patches.features.temperature.sampled import is_narrowed, log_prob_of_model  # noqa: E402
from vllm_patches.v1.sample import sampler  # noqa: E402
from vllm_patches.v1.sample.ops import topk_topp_sampler as draws  # noqa: E402

DRAWS, VOCABULARY = 100_000, 12
LOGITS = torch.tensor([3.0, 2.5, 2.5, 2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0, -4.0])
# (temperature, top-k, top-p, min-p): each alone, combined, and the 256-die jobs' settings at this vocabulary size.
GRID = [
    (1.0, None, None, None),
    (0.6, 5, None, None),
    (1.5, None, 0.9, None),
    (1.0, None, None, 0.2),
    (0.8, 5, 0.9, 0.2),
    (0.9, 50, 0.9, None),
    (0.9, 1, None, None),
]


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr(settings, "_current", settings.OverlaySettings())
    # Unwrap vLLM's own functions: they are already patched if an earlier test imported them with the prelude.
    forward, log_probs = inspect.unwrap(Sampler.forward), inspect.unwrap(Sampler.compute_logprobs)
    monkeypatch.setattr(Sampler, "forward", installed(sampler.forward, forward))
    monkeypatch.setattr(Sampler, "compute_logprobs", installed(sampler.compute_logprobs, log_probs))
    draw = installed(draws.random_sample, inspect.unwrap(topk_topp_sampler.random_sample))
    monkeypatch.setattr(topk_topp_sampler, "random_sample", draw)
    return draw


@pytest.fixture
def of_ascend(patched, monkeypatch):
    """Replace vLLM's operators by vLLM-Ascend's, as VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE=1 does."""
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE", "1")
    for owner, name in ((Sampler, "apply_min_p"), (topk_topp_sampler.TopKTopPSampler, "forward_native")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    package = importlib.util.find_spec("vllm_ascend").submodule_search_locations[0]
    file = Path(package, "patch/worker/patch_common/patch_sampler.py")
    spec = importlib.util.spec_from_file_location("patch_sampler_of_vllm_ascend", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def metadata(degree, top_k, top_p, min_p, rows=DRAWS, **changed):
    def column(value, dtype=torch.float32):
        return None if value is None else torch.full((rows,), value, dtype=dtype).npu()

    values = dict(
        temperature=column(degree), all_greedy=False, all_random=True, top_p=column(top_p),
        top_k=column(top_k if top_k is None else min(top_k, VOCABULARY), torch.int32), min_p=column(min_p),
        generators={}, max_num_logprobs=0, no_penalties=True, prompt_token_ids=None, frequency_penalties=None,
        presence_penalties=None, repetition_penalties=None, output_token_ids=[], min_tokens={},
        logit_bias=[None] * rows, allowed_token_ids_mask=None, bad_words_token_ids={},
    )  # fmt: skip
    return SamplingMetadata(**values | changed)


def drawn(chosen) -> tuple[torch.Tensor, list[Logprob | None]]:
    """Return how often each token was drawn, and its reported log-prob."""
    torch.manual_seed(20)
    output = Sampler()(LOGITS.npu().repeat(len(chosen.logit_bias), 1), chosen)
    tokens = output.sampled_token_ids[:, 0].cpu().long()
    lists = output.logprobs_tensors.tolists()
    reported: list[Logprob | None] = [None] * VOCABULARY
    for token, value, rank in zip(tokens.tolist(), lists.logprobs, lists.sampled_token_ranks, strict=True):
        reported[token] = Logprob(value[0], rank)
    return tokens.bincount(minlength=VOCABULARY), reported


def surprise(counts: torch.Tensor, log_probs: list[float]) -> float:
    """Return by how many standard deviations the chi-square of the counts exceeds its mean.

    Tokens that are expected fewer than 5 times are pooled.
    """
    expected = [DRAWS * math.exp(each) for each in log_probs]
    pairs = [pair for pair in zip(counts.tolist(), expected, strict=True) if pair[1] >= 5]
    pairs.append((DRAWS - sum(count for count, _ in pairs), max(5.0, DRAWS - sum(each for _, each in pairs))))
    freedom = len(pairs) - 1
    found = sum((count - each) ** 2 / each for count, each in pairs)
    return (found - freedom) / math.sqrt(2 * max(freedom, 1))


def check_frequencies(temperature, top_k, top_p, min_p):
    counts, reported = drawn(metadata(temperature, top_k, top_p, min_p))
    of_draw = [-math.inf if each is None else each.logprob for each in reported]
    of_model = (LOGITS / temperature).log_softmax(-1).tolist()
    narrowed = any(limit is not None for limit in (top_k, top_p, min_p))
    assert surprise(counts, of_draw) < 6
    seen = [token for token, each in enumerate(reported) if each is not None]
    assert all(is_narrowed(reported[token]) == narrowed for token in seen)
    assert [log_prob_of_model(reported[token]) for token in seen] == pytest.approx(
        [of_model[token] for token in seen], abs=1e-5
    )
    if len(seen) < VOCABULARY - 1 and narrowed:
        # Control: the model's raw log-probs, which vLLM 0.9.1 reports, differ from those of the sampling distribution.
        assert surprise(counts, of_model) > 100


@pytest.mark.parametrize("chosen", GRID, ids=str)
def test_reported_log_probs_are_frequencies_of_draws(patched, chosen):
    check_frequencies(*chosen)


@pytest.mark.parametrize("chosen", [(0.9, 5, 0.9, None), (1.0, 5, None, 0.2), (1.0, None, 0.9, None)], ids=str)
def test_reported_log_probs_with_vllm_ascends_operators(of_ascend, chosen):
    check_frequencies(*chosen)


def test_penalties_and_biases_are_in_the_reported_log_probs(patched):
    biased = metadata(1.0, None, None, None, logit_bias=[{0: -2.0}] * DRAWS)
    counts, reported = drawn(biased)
    assert surprise(counts, [-math.inf if each is None else each.logprob for each in reported]) < 6
    assert log_prob_of_model(reported[0]) == pytest.approx(LOGITS.log_softmax(-1)[0].item(), abs=1e-5)


def seen_tokens(**penalties):
    """Return metadata with vLLM's penalties after two prompt tokens and three answer tokens.

    Penalties that are left out have no effect.
    """
    values = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0} | penalties
    each = {f"{name}_penalties": torch.full((DRAWS,), value).npu() for name, value in values.items()}
    prompts = torch.tensor([[4, 5]]).repeat(DRAWS, 1).npu()
    return {"no_penalties": False, "prompt_token_ids": prompts, "output_token_ids": [[0, 0, 1]] * DRAWS, **each}


# All options by which vLLM's sampler changes a request's logits, besides temperature, top-k, top-p and min-p.
CHANGED = {
    "repetition_penalty": lambda: seen_tokens(repetition=1.3),
    "presence_penalty": lambda: seen_tokens(presence=0.7),
    "frequency_penalty": lambda: seen_tokens(frequency=0.4),
    "min_tokens": lambda: {"min_tokens": {row: (2, {0}) for row in range(DRAWS)}, "output_token_ids": [[3]] * DRAWS},
    "bad_words": lambda: {
        "bad_words_token_ids": {row: [[3, 1]] for row in range(DRAWS)}, "output_token_ids": [[3]] * DRAWS,
    },
    "allowed_token_ids": lambda: {
        "allowed_token_ids_mask": (torch.arange(VOCABULARY) < 2).repeat(DRAWS, 1).npu(),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_whatever_changes_a_draw_is_in_what_is_reported(patched, name):
    counts, reported = drawn(metadata(1.0, None, None, None, **CHANGED[name]()))
    of_model = LOGITS.log_softmax(-1).tolist()
    assert surprise(counts, [-math.inf if each is None else each.logprob for each in reported]) < 6
    found = {token: log_prob_of_model(each) for token, each in enumerate(reported) if each is not None}
    assert found == pytest.approx({token: of_model[token] for token in found}, abs=1e-5)
    assert surprise(counts, of_model) > 100  # a control


def test_greedy_rows_beside_narrowed_ones_keep_the_models_log_prob(patched):
    temperature = torch.tensor([0.0, 0.5]).npu()
    mixed = metadata(1.0, 2, None, None, rows=2, temperature=temperature, all_random=False)
    reported = Sampler()(LOGITS.npu().repeat(2, 1), mixed).logprobs_tensors.tolists()
    assert reported.logprobs[0] == pytest.approx([LOGITS.log_softmax(-1)[0].item()], abs=1e-5)
    of_model = log_prob_of_model(Logprob(0.0, reported.sampled_token_ranks[0]))
    assert of_model == pytest.approx(reported.logprobs[0][0])


def test_likeliest_tokens_that_could_not_be_drawn_are_minus_infinity(patched):
    reported = Sampler()(LOGITS.npu()[None], metadata(1.0, 1, None, None, rows=1, max_num_logprobs=3))
    assert reported.logprobs_tensors.logprobs.cpu()[0].tolist() == pytest.approx([0.0, 0.0, -math.inf, -math.inf])


@pytest.mark.parametrize(("enabled", "divisor"), [(True, 0.5), (False, 1.0)])
def test_log_probs_are_of_the_sampled_distribution_only_while_switched_on(monkeypatch, enabled, divisor):
    chosen = settings.OverlaySettings(temperature=TemperatureSettings(enabled=enabled))
    monkeypatch.setattr(settings, "_current", chosen)
    logits = torch.tensor([[1.0, 3.0, 2.0]])

    def forward(self, logits, sampling_metadata):
        reported = installed(sampler.compute_logprobs, lambda self, values: values.log_softmax(-1))(self, logits)
        return SimpleNamespace(logprobs_tensors=reported)

    given = metadata(1.0, None, None, None, rows=1, temperature=torch.tensor([0.5]))
    reported = installed(sampler.forward, forward)(None, logits, given)
    assert torch.equal(reported.logprobs_tensors, (logits / divisor).log_softmax(-1))
