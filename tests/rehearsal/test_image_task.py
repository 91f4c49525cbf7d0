"""The pictures match their answers, and datasets, verl and Qwen's processor can read the files."""

from collections import Counter

import datasets
import numpy
import pyarrow.parquet
import pytest
from scipy import ndimage
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from post_training.rewards import score
from post_training.rewards.verifier import Verifier
from rehearsal.image_task import (
    COLOURS,
    IMAGE_SIZE,
    QUESTIONS,
    ImageExercise,
    all_pictures,
    draw_exercises,
    write_image_task,
)


def test_pixels_show_the_answers():
    background = numpy.array((123, 117, 104))
    for picture in all_pictures()[::37]:
        pixels = numpy.asarray(picture.draw())
        filled = (pixels != background).any(axis=2)
        _, count = ndimage.label(filled)
        rows, columns = numpy.nonzero(filled)
        down, right = rows.mean() - (IMAGE_SIZE - 1) / 2, columns.mean() - (IMAGE_SIZE - 1) / 2
        horizontal = "left" if right < 0 else "right"
        side = horizontal if abs(right) > abs(down) else ("top" if down < 0 else "bottom")
        assert picture.answer("count") == str(count)
        assert picture.answer("side") == side
        assert {tuple(colour) for colour in pixels[filled].tolist()} == {COLOURS[picture.answer("colour")]}


def test_training_and_test_pictures_disjoint():
    train, test = draw_exercises(3, 512)
    assert (len(train), len(test)) == (512, 64)
    assert len({each.picture for each in train + test}) == 576
    asked = Counter(each.question for each in train)
    assert set(asked) == set(QUESTIONS) and min(asked.values()) > 128
    counts = Counter(len(each.picture.cells) for each in train)
    assert sorted(counts) == [1, 2, 3, 4] and min(counts.values()) > 96


@pytest.mark.parametrize("rows", [0, -1, 4609])
def test_impossible_number_of_rows_rejected(rows):
    with pytest.raises(ValueError, match="from 1 to 4608"):
        draw_exercises(1, rows)


def test_largest_number_of_rows_drawn():
    assert sum(map(len, draw_exercises(1, 4608))) == len(all_pictures())


def test_equal_seeds_give_equal_files(tmp_path):
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        write_image_task(tmp_path / name, seed, 16)
    for file in ("train.parquet", "test.parquet"):
        first, second, other = ((tmp_path / name / file).read_bytes() for name in ("first", "second", "other"))
        assert first == second != other


def test_columns_equal_those_of_geo3k(tmp_path):
    write_image_task(tmp_path, 1, 8)
    rows = pyarrow.parquet.read_table(tmp_path / "train.parquet").to_pylist()
    assert list(rows[0]) == ["data_source", "prompt", "images", "ability", "reward_model", "extra_info"]
    assert list(rows[0]["images"][0]) == ["bytes", "path"]
    assert rows[3]["extra_info"]["index"] == 3
    assert rows[3]["prompt"][0]["content"].startswith(rows[3]["extra_info"]["question"] + " ")
    assert rows[3]["prompt"][0]["content"].count("<image>") == len(rows[3]["images"])


def test_datasets_decodes_the_images(tmp_path):
    write_image_task(tmp_path, 1, 8)
    train, _ = draw_exercises(1, 8)
    read = datasets.load_dataset("parquet", data_files=str(tmp_path / "train.parquet"), cache_dir=tmp_path)["train"]
    for row, exercise in zip(read, train, strict=True):
        assert row["images"][0].tobytes() == exercise.picture.draw().tobytes()
        assert row["reward_model"]["ground_truth"] == exercise.answer


def test_an_image_is_four_vision_tokens():
    pixels = Qwen2VLImageProcessor()([draw_exercises(1, 1)[0][0].picture.draw()])
    assert pixels["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_only_the_asked_answer_is_rewarded():
    picture = all_pictures()[0]
    exercise = ImageExercise(picture, "side")
    scores = {read_as: score(exercise.solution(read_as), exercise.answer, Verifier()) for read_as in QUESTIONS}
    assert scores == {"count": 0.0, "colour": 0.0, "side": 1.0}
