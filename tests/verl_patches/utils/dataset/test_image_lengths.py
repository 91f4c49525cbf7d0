"""Which prompts with images verl's data set drops."""

from types import SimpleNamespace

import pytest
from datasets import Dataset

from verl_patches.utils.dataset.rl_dataset import leave_out_prompts_with_too_many_image_tokens

LENGTHS = [7, 8, 9]


@pytest.mark.parametrize(
    "changes, kept",
    [
        ({}, [7, 8]),  # exactly the maximum length is allowed
        ({"max_prompt_length": 6}, []),
        ({"filter_overlong_prompts": False}, LENGTHS),
        ({"processor": None}, LENGTHS),
        ({"image_key": "pictures"}, LENGTHS),
    ],
)
def test_prompts_of_more_tokens_than_allowed_are_left_out(monkeypatch, capsys, changes, kept):
    from post_training.data import images

    monkeypatch.setattr(images, "sizes_in", lambda content: content)
    monkeypatch.setattr(images, "prompt_lengths", lambda processor, prompts, sizes: [prompts[0]])
    rows = Dataset.from_list([{"prompt": length, "images": [1]} for length in LENGTHS])
    data = SimpleNamespace(
        processor="processor", filter_overlong_prompts=True, image_key="images", prompt_key="prompt",
        max_prompt_length=8, dataframe=rows,
    )  # fmt: skip
    vars(data).update(changes)
    read = []
    leave_out_prompts_with_too_many_image_tokens(read.append, data)
    assert read == [data] and data.dataframe["prompt"] == kept
    assert ("prompts have more than" in capsys.readouterr().out) == (kept != LENGTHS)
