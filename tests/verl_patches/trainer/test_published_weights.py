"""From a published checkpoint to training: cast to bfloat16 first, or read directly by every die."""

from pathlib import Path

import pytest

from tests.verl_patches.trainer.published_weights import cast, describe, write_published
from tests.verl_patches.trainer.scaled_job import (
    TRUE,
    TWO_DIES,
    assert_exact,
    assert_left_the_reference,
    run_scaled_job,
)

WEIGHTS = "actor_rollout_ref.actor.megatron.load_from_hf"
# Metrics that both ways must share: tokens, their probabilities, gradients.
COMPUTED = ("actor/", "critic/", "response_length/", "prompt_length/", "training/rollout_logprob", "global_seqlen/")


def computed(steps: list[dict]) -> list[dict]:
    return [{name: value for name, value in step.items() if name.startswith(COMPUTED)} for step in steps]


@pytest.mark.exhaustive
def test_both_ways_from_fp8_train_the_same_model(mla_inputs, tmp_path):
    published = write_published(mla_inputs[0], tmp_path / "fp8")
    description = describe(published, tmp_path / "description")

    def train(name: str, model: Path, *overrides: str) -> list[dict]:
        (tmp_path / name).mkdir()
        steps = run_scaled_job(TRUE, tmp_path / name, model, mla_inputs[1], *TWO_DIES, *overrides, dies=2)
        assert_exact(steps, 2)
        assert_left_the_reference(steps)
        return computed(steps)

    from_copy = train("from the copy", cast(published, tmp_path / "bf16"))
    assert from_copy and all(step["actor/grad_norm"] > 0 for step in from_copy)
    assert train("from fp8", description, f"{WEIGHTS}={published}") == from_copy
    other = write_published(mla_inputs[0], tmp_path / "other", seed=1)
    assert train("from other weights", description, f"{WEIGHTS}={other}") != from_copy
