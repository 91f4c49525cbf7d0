"""The exercises are correct, disjoint, and equal to the files in data/arithmetic."""

import json
from pathlib import Path

import pytest

from rehearsal.tiny_model.task import Exercise, all_exercises, split_exercises, write_records

DATA = Path(__file__).parents[3] / "data" / "arithmetic"


def test_every_answer_is_what_python_computes():
    exercises = all_exercises()
    assert len(exercises) == len(set(exercises)) == 255
    for exercise in exercises:
        assert int(exercise.answer) == eval(exercise.problem) >= 0


def test_parsing_reads_every_problem_back():
    assert [Exercise.parse(exercise.problem) for exercise in all_exercises()] == all_exercises()


@pytest.mark.parametrize("text", ["", "7", "7/8", "17+8", "7+8=", "x+1"])
def test_other_problems_are_no_exercises(text):
    with pytest.raises(ValueError, match="is not an exercise"):
        Exercise.parse(text)


def test_another_sign_gives_another_exercise():
    assert Exercise(3, "+", 7).with_sign("-").solution == r"3-7=\boxed{-4}"


def test_training_and_test_exercises_are_disjoint_and_complete():
    training, test = split_exercises(seed=3)
    assert not set(training) & set(test)
    assert set(training) | set(test) == set(all_exercises())


@pytest.mark.parametrize("seed", range(5))
def test_the_mirror_image_of_every_test_exercise_is_trained(seed):
    training, test = split_exercises(seed)
    assert len(test) == 24
    assert all(exercise.mirrored in training and exercise.mirrored.answer == exercise.answer for exercise in test)


def test_the_seed_alone_decides_the_split():
    assert split_exercises(1) == split_exercises(1)
    assert split_exercises(1) != split_exercises(2)


@pytest.mark.parametrize("count", [0, -1, 91])
def test_an_impossible_number_of_test_exercises_is_an_error(count):
    with pytest.raises(ValueError, match="only 1 to 90"):
        split_exercises(0, count)


def test_records_have_the_columns_of_deepscaler(tmp_path):
    write_records([Exercise(7, "*", 8)], tmp_path / "folder" / "records.jsonl")
    lines = (tmp_path / "folder" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"problem": "7*8", "answer": "56", "solution": r"7*8=\boxed{56}"}]


@pytest.mark.parametrize("name", ["train", "test"])
def test_the_files_in_data_are_what_the_generator_writes(name, tmp_path):
    exercises = dict(zip(("train", "test"), split_exercises(seed=0), strict=True))[name]
    write_records(exercises, tmp_path / "records.jsonl")
    assert (tmp_path / "records.jsonl").read_bytes() == (DATA / f"{name}.jsonl").read_bytes()
