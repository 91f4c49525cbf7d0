"""The driver seeds every prompt by the step and its place in the batch, and engines sample with that seed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams

from verl_patches.features.partial_rollout.columns import ROWS
from verl_patches.features.request_noise.seeds import SEED, Seeds, seeded, take_seeds


def prompts_of(number: int, columns: dict[str, Any] | None = None, **meta: Any) -> DataProto:
    return DataProto.from_dict({"input_ids": torch.arange(number)[:, None]}, columns or {}, meta_info=meta)


def sent(seeds: Seeds, prompts: DataProto) -> list[int] | None:
    return seeds.sending(take_seeds)(prompts)  # type: ignore[arg-type, return-value]  # a list in the place of answers


def test_seeds_depend_on_the_run_the_step_and_the_batch_within_it():
    step = {"now": 1}

    def of(run: int) -> Seeds:
        return Seeds(run, lambda: step["now"])

    one = of(1)
    first, second = sent(one, prompts_of(4)), sent(one, prompts_of(4))
    step["now"] = 2
    third = sent(one, prompts_of(4))
    step["now"] = 1
    assert first is not None and second is not None and third is not None
    assert len({*first, *second, *third}) == 12 and min(first) >= 0
    assert sent(of(1), prompts_of(4)) == first  # as after a resume
    assert not {*first} & {*(sent(of(2), prompts_of(4)) or [])}
    step["now"] = 2
    assert sent(of(1), prompts_of(4)) == third


@pytest.mark.parametrize("mark", [{"validate": True}, {"do_sample": False}])
def test_other_prompts_have_none(mark):
    assert sent(Seeds(1, lambda: 1), prompts_of(2, **mark)) is None


def test_answers_that_go_on_have_none():
    assert sent(Seeds(1, lambda: 1, ROWS), prompts_of(2, {ROWS: np.array([1, 2], dtype=object)})) is None


def test_the_batch_of_the_caller_stays_as_it_is():
    prompts = prompts_of(2)
    sent = Seeds(1, lambda: 1).sending(lambda sent: sent)(prompts)
    assert SEED not in prompts.batch.keys() and SEED in sent.batch.keys()
    names = list(prompts.batch.keys())
    assert names and all(sent.batch[name] is prompts.batch[name] for name in names), "nothing is copied"


def engine() -> tuple[Any, list[Any]]:
    """Return a stand-in for vLLM's engine, and the list of sampling parameters that it received."""
    asked: list[Any] = []

    class Engine:
        def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> str:
            asked.append(sampling_params)
            return "answers"

    return Engine(), asked


def test_each_prompt_samples_with_its_seed_and_the_rest_of_the_parameters():
    llm, asked = engine()
    params = SamplingParams(n=2, temperature=0.7, top_k=5, max_tokens=9)
    with seeded(llm, [3, 4]):
        assert llm.generate(prompts=["a", "b"], sampling_params=params, use_tqdm=False) == "answers"
    llm.generate(prompts=["a", "b"], sampling_params=params, use_tqdm=False)
    each, afterwards = asked
    assert [found.seed for found in each] == [3, 4] and afterwards is params and params.seed is None
    assert {(found.n, found.temperature, found.top_k, found.max_tokens) for found in each} == {(2, 0.7, 5, 9)}


@pytest.mark.parametrize(("seeds", "temperature"), [(None, 0.7), ([3, 4], 0.0)])
def test_without_seeds_or_noise_the_parameters_are_passed_on(seeds, temperature):
    llm, asked = engine()
    params = SamplingParams(temperature=temperature)
    with seeded(llm, seeds):
        llm.generate(prompts=["a", "b"], sampling_params=params, use_tqdm=False)
    assert asked == [params] and asked[0] is params and SimpleNamespace(**vars(llm)) == SimpleNamespace()
