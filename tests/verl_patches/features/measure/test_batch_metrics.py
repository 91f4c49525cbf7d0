"""The workers' update reports metrics of its batch beside verl's own."""

from types import SimpleNamespace

import numpy as np
import torch

from post_training.rewards import counts
from verl_patches.features.measure import serialized
from verl_patches.features.measure.batch_metrics import truncated, with_batch_metrics

END = 1


class Batch:
    """Three answers of two tokens; the last two belong to one prompt, and the first has no end token."""

    def __init__(self) -> None:
        self.batch = {
            "responses": torch.tensor([[5, 6], [5, END], [5, END]]),
            "attention_mask": torch.ones(3, 4, dtype=torch.long),
            "token_level_scores": torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]),
        }
        self.non_tensor_batch = {"uid": np.array(["a", "b", "b"], dtype=object)}

    def __len__(self) -> int:
        return len(self.batch["responses"])


def test_batch_metrics_join_those_of_its_update():
    counts.take(), serialized.take()  # clear what earlier tests left
    update = with_batch_metrics(
        lambda batch: SimpleNamespace(meta_info={"metrics": {"loss": 2.0}}),
        [END, 9],
        lambda: {"sampling/generated_prompts": 7},
    )
    for handed in (10, 0):
        serialized.add(handed)
        for _ in range(handed // 10):
            counts.add(counts.LOST)
        assert update(Batch()).meta_info["metrics"] == {
            "loss": 2.0,
            "sampling/trained_prompts": 2,
            "sampling/generated_prompts": 7,
            "sampling/groups_with_gradient": 0.5,
            "sampling/truncated_share": torch.tensor(1 / 3).item(),
            "perf/driver_bytes_per_sample": handed / 3,
            **dict.fromkeys(counts.ALL, 0),
            "reward/lost": handed / 10,
        }


def test_every_end_token_ends_an_answer():
    """Llama 3 has three; an answer of maximum length that ends with any of them was not cut."""
    responses = torch.tensor([[5, 128001], [5, 128008], [5, 128009], [5, 6], [128009, 0]])
    mask = torch.tensor([[1, 1]] * 4 + [[1, 0]])
    assert truncated(responses, mask, (128001, 128008, 128009)).tolist() == [False, False, False, True, False]
    assert truncated(responses, mask, ()).tolist() == [True, True, True, True, False]
