"""Question files of every known form are read, and all others get one clear error."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from post_training.data import INSTRUCTION, DataError, Problem, Reading, read_problems, split, to_row
from post_training.data.records import Repetition

DEEPSCALER = {"problem": "1+1", "answer": "2", "solution": "easy"}
GSM8K = {"question": "How many?", "answer": "70 * 1000 = 70,000\n#### 70,000"}


def write(folder, text, name="data.json"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_deepscaler_list(tmp_path):
    path = write(tmp_path, json.dumps([DEEPSCALER, {"problem": "2+2", "answer": 4}], indent=1))
    assert read_problems(path) == Reading([Problem("1+1", "2", "easy"), Problem("2+2", "4", "")], [], [])


def test_deepscaler_lines_with_blank_lines_and_other_separators(tmp_path):
    path = write(tmp_path, '{"problem": "a\u2028b", "answer": "2"}\n\n' + json.dumps(DEEPSCALER) + "\n", "data.jsonl")
    assert [problem.question for problem in read_problems(path).problems] == ["a\u2028b", "1+1"]


def test_gsm8k_answer_follows_the_mark(tmp_path):
    path = write(tmp_path, json.dumps(GSM8K), "data.jsonl")
    assert read_problems(path).problems == [Problem("How many?", "70000", "70 * 1000 = 70,000", "openai/gsm8k")]


@pytest.mark.parametrize(
    ("worked", "answer", "solution"),
    [
        ("3 #### 3\nno, 4\n#### 4", "4", "3 #### 3\nno, 4"),  # the last marker counts
        ("#### -1,234,567.50 ", "-1234567.50", ""),
        ("so\n#### 7 apples", "7 apples", "so"),
        ("a\n\n####5", "5", "a"),
    ],
)
def test_gsm8k_answer_follows_the_last_mark(tmp_path, worked, answer, solution):
    record = {"question": "How many?", "answer": worked}
    problems = read_problems(write(tmp_path, json.dumps(record), "data.jsonl")).problems
    assert problems == [Problem("How many?", answer, solution, "openai/gsm8k")]


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"thus \boxed 7$", "7"),
        (r"thus $\boxed 2\sqrt{3}$, as $x>0$", r"2\sqrt{3}"),
        (r"thus $\boxed \frac{1}{2}.$", r"\frac{1}{2}"),
        (r"thus $\boxed -\frac{3}{4}$", r"-\frac{3}{4}"),
        (r"thus $\boxed \text{(A)}$", r"\text{(A)}"),
        (r"thus \fbox{42}", "42"),
    ],
)
def test_math_lighteval_answer_is_in_the_last_box(tmp_path, solution, answer):
    record = {"problem": "x", "level": "Level 5", "type": "Algebra", "solution": solution}
    problems = read_problems(write(tmp_path, json.dumps(record))).problems
    assert problems == [Problem("x", answer, solution, "DigitalLearningGmbH/MATH-lighteval")]


def test_records_of_a_parquet_file_are_counted_over_its_batches(tmp_path):
    path = tmp_path / "groups.parquet"
    rows = [{**GSM8K, "question": f"{row}+1"} for row in range(4)] + [{**GSM8K, "question": "4+1", "answer": "no mark"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    assert len(pyarrow.parquet.read_table(path).to_batches()) == 3
    (missing,) = read_problems(path).without_answer
    assert missing.startswith("record 5: ")


def test_parquet_as_the_hub_has_it(tmp_path):
    path = tmp_path / "train-00000-of-00001.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GSM8K, {**GSM8K, "question": "And now?"}]), path)
    assert [(problem.question, problem.answer) for problem in read_problems(path).problems] == [
        ("How many?", "70000"),
        ("And now?", "70000"),
    ]
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(DataError, match="is a broken parquet file"):
        read_problems(path)


def test_records_without_answer_are_left_out_and_reported(tmp_path):
    without = [
        {"problem": "1+1", "answer": " "},
        {"problem": "1+1", "answer": None},
        {"question": "x", "answer": "no mark"},
        {"question": "x", "answer": "mark\n#### "},
        {"problem": "x", "solution": "no box"},
        {"problem": "x", "answer": "NaN"},
        {"question": "x", "answer": "#### nan"},
        {"problem": "x", "solution": r"\boxed{\boxed{}}"},
        {"problem": "x", "solution": r"first \boxed{3}, and then \boxed 2\sqrt{3} in all"},
    ]
    reading = read_problems(write(tmp_path, "\n".join(map(json.dumps, [*without, DEEPSCALER]))))
    assert reading.problems == [Problem("1+1", "2", "easy")] and reading.repeated == []
    assert [reason.partition(":")[0] for reason in reading.without_answer] == [f"line {n}" for n in range(1, 10)]
    assert 'the column "answer" is empty' in reading.without_answer[0]
    assert "no braces and no clear end" in reading.without_answer[8]
    with pytest.raises(DataError, match="no record has an answer .line 1: the column"):
        read_problems(write(tmp_path, "\n".join(map(json.dumps, without))))


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_nan_is_a_missing_value(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    nan = float("nan")
    records = [
        {"problem": "1+1", "answer": 2.0, "solution": nan},
        {"problem": "2+2", "answer": nan, "solution": "add"},
        {"problem": "2+3", "answer": 5.0, "solution": None},
    ]
    if kind == "parquet":
        columns = {"problem": ["1+1", "2+2", "2+3"], "answer": [2.0, nan, 5.0], "solution": [nan, nan, nan]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        path.write_text(json.dumps(records) if kind == "json" else "\n".join(map(json.dumps, records)))
    reading = read_problems(path)
    assert reading.problems == [Problem("1+1", "2.0"), Problem("2+3", "5.0")]
    assert [reason.partition(" ")[2] for reason in reading.without_answer] == ['2: the column "answer" is NaN']


def test_repeated_questions_are_left_out_and_reported(tmp_path):
    again = {"problem": "1+1", "answer": "2"}
    records = [DEEPSCALER, {"problem": "1 \n +1", "answer": "9"}, again, {"problem": "1  +1", "answer": "8"}]
    reading = read_problems(write(tmp_path, json.dumps(records)))
    assert [problem.answer for problem in reading.problems] == ["2", "9"]
    assert reading.repeated == [Repetition("record 3", "record 1", True), Repetition("record 4", "record 2", False)]


def test_a_record_that_occurs_twice_as_it_is_is_reported(tmp_path):
    reading = read_problems(write(tmp_path, json.dumps([DEEPSCALER, DEEPSCALER, {**DEEPSCALER, "solution": "other"}])))
    assert reading.problems == [Problem("1+1", "2", "easy")]
    assert reading.repeated == [Repetition("record 2", "record 1", True), Repetition("record 3", "record 1", True)]


def test_only_white_space_makes_no_other_question(tmp_path):
    """Only white space is ignored: a variable in another case makes another question."""
    records = [{"problem": problem, "answer": "2"} for problem in ("Find x", "Find X", "find x", "Find  x")]
    reading = read_problems(write(tmp_path, json.dumps(records)))
    assert [problem.question for problem in reading.problems] == ["Find x", "Find X", "find x"]
    assert reading.repeated == [Repetition("record 4", "record 1", True)]


def test_columns_of_one_name_and_bytes_that_are_no_text_rejected(tmp_path):
    path = tmp_path / "twice.parquet"
    columns = [pyarrow.array(["1+1"]), pyarrow.array(["2+2"]), pyarrow.array(["2"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, ["problem", "problem", "answer"]), path)
    with pytest.raises(DataError, match="has 2 columns named problem. Keep one"):
        read_problems(path)
    broken = pyarrow.array([b"2", b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1+1", "0+1"], "answer": broken}), path)
    with pytest.raises(DataError, match="row 1, column answer is not UTF-8"):
        read_problems(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problem"),
        ("[]", "has no problem"),
        ("\n\n", "has no problem"),
        ('[{"problem": "1",\n "answer": }]', r"line 2 is not valid JSON"),
        (json.dumps(DEEPSCALER) + "\n{oops\n", r"line 2 is not valid JSON"),
        ('{"a": 1, "b": 2}', "line 1 has the columns a, b: problem and answer"),
        ("[1]", "record 1 is int, not a JSON object"),
        ('{"problem": "", "answer": "1"}', '"problem" is empty'),
        ('{"problem": "1+1", "answer": true}', "is bool"),
        ('{"problem": "1+1", "answer": NaN}', 'no record has an answer .line 1: the column "answer" is NaN'),
        ('{"problem": NaN, "answer": "2"}', '"problem" is nan'),
        ('{"problem": ["x"], "answer": "1"}', '"problem" is list'),
        ("[" * 100_000, "is nested too deeply"),
        (json.dumps(DEEPSCALER) + "\n" + '{"problem": ' + "[" * 100_000, "line 2 is nested too deeply"),
        ('{"problem": "1+1", "answer": ' + "9" * 5000 + "}", "line 1 has a number that is too long"),
        ('[{"problem": "1+1", "answer": ' + "9" * 5000 + "}]", "has a number that is too long"),
        (r'{"problem": "\ud800", "answer": "1"}', r'"problem" has the lone surrogate .ud800'),
        (r'{"problem": "1", "answer": "x\udfff"}', r'"answer" has the lone surrogate .udfff'),
        (r'{"problem": "1", "answer": "1", "solution": "\ud800"}', '"solution" has the lone surrogate'),
        ('{"problem": "1+1", "answer": Infinity}', "is inf"),
        (json.dumps(DEEPSCALER) + '\n{"problem": "1/0", "answer": -Infinity}', "line 2: the column .answer. is -inf"),
    ],
)
def test_bad_content_is_one_sentence_that_names_the_place(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        read_problems(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_folder_and_wrong_encoding(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_problems(tmp_path / "absent.json")
    with pytest.raises(DataError, match="is not a file"):
        read_problems(tmp_path)
    (tmp_path / "latin.json").write_bytes(b'{"problem": "\xe9", "answer": "1"}')
    with pytest.raises(DataError, match="not UTF-8"):
        read_problems(tmp_path / "latin.json")


def test_row_has_verls_columns():
    row = to_row(Problem("1+1", "2", "easy"), 7, "train", "own", INSTRUCTION)
    assert row["prompt"] == [{"role": "user", "content": r"1+1 Put the answer in \boxed{}."}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert row["extra_info"]["index"] == 7 and row["data_source"] == "own" and row["ability"] == "math"
    bare = to_row(Problem("1+1", "2"), 0, "train", None, "")
    assert bare["prompt"][0]["content"] == "1+1" and bare["data_source"] == "deepscaler"


@given(count=st.integers(2, 60), seed=st.integers(0, 5), data=st.data())
def test_split_is_a_partition_that_the_seed_decides(count, seed, data):
    test_count = data.draw(st.integers(1, count - 1))
    train, test = split(range(count), test_count, seed)
    assert sorted(train + test) == list(range(count)) and len(test) == test_count
    assert (train, test) == split(range(count), test_count, seed)


def test_seeds_differ_and_bad_sizes_rejected():
    assert split(range(100), 10, 1) != split(range(100), 10, 2)
    assert all(part != sorted(part) for part in split(range(100), 10, 1)), "nothing was shuffled"
    for count in (0, 3, 4):
        with pytest.raises(DataError, match="at least 1 test record"):
            split(range(3), count, 0)
