"""The supervised phase of the vision-language model: its training targets, and that it learns them."""

from dataclasses import replace

import pytest
import torch

from rehearsal.image_task import QUESTIONS, draw_exercises
from rehearsal.tiny_model.image_warm_start import IMAGE_WARM_START, encode_image_readings, train
from rehearsal.tiny_model.processor import build_processor
from rehearsal.tiny_model.tokenizer import IMAGE, VIDEO, VISION_END, VISION_START, build_image_tokenizer


@pytest.fixture(scope="module")
def processor():
    return build_processor()


def test_image_tokens_have_the_ids_of_the_model():
    from rehearsal.tiny_model.architecture import TINY_MODELS

    names = {"vision_start": VISION_START, "vision_end": VISION_END, "image": IMAGE, "video": VIDEO}
    tokenizer, values = build_image_tokenizer(), TINY_MODELS["qwen2_5_vl"]
    assert {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()} == {
        name: values[f"{name}_token_id"] for name in names
    }


def test_labels_answer_each_question(processor):
    exercises = draw_exercises(3, 16)[0]
    readings = encode_image_readings(processor, exercises)
    for row, exercise in enumerate(exercises):
        for number, question in enumerate(QUESTIONS):
            text = processor.tokenizer.decode(readings.labels[row, :, number], skip_special_tokens=True)
            assert text == exercise.solution(question)
        answered, asked = readings.answered[row], readings.asked[row]
        following = readings.inputs[row, answered[:-1] + 1]
        assert torch.equal(following, readings.labels[row, :-1, asked])
        text = processor.tokenizer.decode(readings.inputs[row, : answered[0] + 1], skip_special_tokens=True)
        assert QUESTIONS[exercise.question] in text


def test_warm_start_lowers_its_loss(processor):
    from transformers import AutoModelForVision2Seq

    from rehearsal.tiny_model.architecture import tiny_config

    torch.manual_seed(0)
    model = AutoModelForVision2Seq.from_config(tiny_config(0, 1, 2, "qwen2_5_vl"))
    losses: list[float] = []
    settings = replace(IMAGE_WARM_START, steps=12, batch_size=8, ramp_steps=4)
    reward = train(model, processor, settings, 0, lambda step, loss: losses.append(loss))
    assert len(losses) == 12 and losses[-1] < 0.7 * losses[0]
    assert 0 <= reward < 1
