"""Results of an evaluation: reading, scoring and showing questions."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from post_training.data import DataError, Problem, to_row
from post_training.data.parquet import write_files
from post_training.evaluation.judging import RewardError, judge, load_reward
from post_training.evaluation.page import QUESTIONS, _sample, render_page
from post_training.evaluation.problems import Question, read_questions
from post_training.evaluation.results import Answer, Answers, Evaluated, as_json, table, tried
from tests.html_pages import StrictPage, shown_by_chromium

HOSTILE = "</pre><script>document.title='taken'</script><img src=http://example.org/x>"


def question(number: int) -> Question:
    return Question(({"role": "user", "content": f"ask {number};"},), str(number), "arithmetic", {})


def answer(right: bool, text: str = "text") -> Answer:
    return Answer(text, 5, False, float(right), right, right)


def model(name: str, greedy: str, sampled: list[str]) -> Evaluated:
    """Make a model from results: per question one letter for the greedy answer, and one word for the sampled ones."""
    answers = [
        Answers(answer(verdict == "r"), tuple(answer(each == "r") for each in word))
        for verdict, word in zip(greedy, sampled, strict=True)
    ]
    return Evaluated(name, f"/models/{name}", answers)


BEFORE = model("before", "wwr", ["wwww", "rwww", "rrww"])
AFTER = model("after", "rwr", ["rrww", "rwww", "rrrr"])
ASKED = [question(number) for number in range(3)]


def test_results_are_means_over_questions():
    found = {name: each.value for name, each in BEFORE.estimates().items()}
    assert found == pytest.approx(
        {"greedy": 1 / 3, "avg@4": 3 / 12, "pass@2": (0 + 1 / 2 + 5 / 6) / 3, "pass@4": 2 / 3}
    )
    assert [tried(n) for n in (0, 1, 2, 3, 8, 12)] == [[], [], [2], [2, 3], [2, 4, 8], [2, 4, 8, 12]]


def test_models_are_compared_question_by_question():
    more = AFTER.against(BEFORE)
    assert more["avg@4"].value == pytest.approx((2 + 0 + 2) / 12)
    # Questions with equal results in both do not count; separate intervals of the two models would be wider.
    alike = AFTER.against(AFTER)
    assert all((each.value, each.low, each.high) == (0, 0, 0) for each in alike.values())
    lines = table([BEFORE, AFTER]).splitlines()
    assert lines[0].split() == ["greedy", "avg@4", "pass@2", "pass@4", "boxed", "cut", "tokens"]
    assert lines[1].startswith("before") and lines[3].startswith("after - before") and "+0.333 [" in lines[3]


def test_the_json_holds_every_answer():
    content = json.loads(json.dumps(as_json([BEFORE, AFTER], ASKED, {"n": 4})))
    assert [each["name"] for each in content["models"]] == ["before", "after"]
    verdicts = [[each["right"] for each in one["answers"]["after"]["sampled"]] for one in content["questions"]]
    assert verdicts == [[letter == "r" for letter in word] for word in ("rrww", "rwww", "rrrr")]
    assert content["models"][1]["against_the_first"]["greedy"]["value"] == pytest.approx(1 / 3)


def test_the_page_says_what_changed_first_and_runs_nothing_of_an_answer():
    hostile = Evaluated("after", "x", [*AFTER.answers[:2], Answers(answer(True, HOSTILE), AFTER.answers[2].sampled)])
    page = render_page([BEFORE, hostile], ASKED, {"data": "file", "emulated": True})
    read = StrictPage(page)
    assert HOSTILE in read.text and read.tags["script"] == 1 and "img" not in read.tags
    assert read.text.index("ask 0;") < read.text.index("ask 1;") and "emulated NPU" in read.text
    swapped = [*AFTER.answers[1:], AFTER.answers[0]]
    order = StrictPage(render_page([BEFORE, Evaluated("after", "x", swapped)], ASKED, {"emulated": False})).text
    # Now the models only differ on the second question.
    assert order.index("ask 1;") < order.index("ask 0;") < order.index("ask 2;") and "emulated" not in order


def test_page_shows_a_stated_part_of_many_questions():
    many = QUESTIONS + 30
    asked = [question(number) for number in range(many)]
    models = [model(name, "w" * (many - 1) + last, [""] * many) for name, last in (("a", "w"), ("b", "r"))]
    page = render_page(models, asked, {"emulated": False})
    text = " ".join(StrictPage(page).text.split())
    assert page.count("<article") == QUESTIONS and f"{QUESTIONS} of {QUESTIONS} shown, of {many} in" in text
    assert text.index(f"ask {many - 1};") < text.index("ask 0;") and "right samples" not in text


@pytest.mark.parametrize(
    ("asked", "shown"),
    [("", [0, 1, 2]), ("greedy=wrong → right", [0]), ("sampled=some&text=ASK 1", [1]), ("text=absent", [])],
)
def test_browser_shows_the_requested_samples(tmp_path, asked, shown):
    page = tmp_path / "evaluation.html"
    page.write_text(render_page([BEFORE, AFTER], ASKED, {"emulated": False}), encoding="utf-8")
    seen = shown_by_chromium(page, tmp_path / "profile", asked)
    if seen is None:
        pytest.skip("NOT RUN: no Chromium is installed; the page was only parsed")
    articles = [part.partition(">") for part in seen.split("<article")[1:]]
    visible = [number for number in range(3) for head, _, body in articles
               if f"ask {number};<" in body and "hidden" not in head]  # fmt: skip
    assert sorted(visible) == shown and f'<span id="count">{len(shown)}</span>' in seen


def test_questions_of_both_kinds_of_files_are_the_same(tmp_path):
    problems = [Problem("2+2", "4", "It is 4.", "arithmetic"), Problem("3-1", "2")]
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps({"problem": each.question, "answer": each.answer}) + "\n" for each in problems)
    )
    write_files({tmp_path / "few.parquet": [to_row(each, 0, "test", None, "Box it.") for each in problems]})
    plain, trained = read_questions(tmp_path / "few.jsonl", "Box it."), read_questions(tmp_path / "few.parquet")
    assert [each.messages for each in plain] == [each.messages for each in trained]
    assert [each.truth for each in plain] == ["4", "2"] and trained[0].source == "arithmetic"
    assert plain[0].text == "2+2 Box it." and trained[0].extra["solution"] == "It is 4."


def test_a_file_without_the_columns_rejected(tmp_path):
    (tmp_path / "wrong.jsonl").write_text('{"question": "2+2", "target": "4"}\n')
    with pytest.raises(DataError, match="has the columns question, target"):
        read_questions(tmp_path / "wrong.jsonl")
    table = pyarrow.table({"prompt": [[{"role": "user", "content": "2+2"}]], "data_source": ["x"]})
    pyarrow.parquet.write_table(table, tmp_path / "wrong.parquet")
    with pytest.raises(DataError, match="column reward_model: it is missing"):
        read_questions(tmp_path / "wrong.parquet")
    with pytest.raises(DataError, match="does not exist"):
        read_questions(tmp_path / "absent.parquet")


def write_reward(folder, body: str) -> str:
    (folder / "reward.py").write_text(
        f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n {body}\n"
    )
    return str(folder / "reward.py")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", (1.0, True)),
        ("return 0.1  # for the form alone", (0.1, False)),
        ("return {'score': 0.4, 'acc': 1.0}  # a penalty was taken off", (0.4, True)),
        ("return {'score': 1.0, 'acc': 0.0}", (1.0, False)),
        ("return float(solution_str == ground_truth == '1' and data_source == 'arithmetic')", (1.0, True)),
    ],
)
def test_an_answer_is_right_by_its_accuracy_or_its_full_score(tmp_path, body, expected):
    assert judge(load_reward(write_reward(tmp_path, body)), question(1), "1", {}) == expected


@pytest.mark.parametrize("body", ["raise KeyError('x')", "return None", "return float('nan')", "return {'acc': 1}"])
def test_a_reward_that_gives_no_number_is_not_passed_over(tmp_path, body):
    with pytest.raises(RewardError, match="answer to 'ask 1;'"):
        judge(load_reward(write_reward(tmp_path, body)), question(1), "1", {})


def test_a_reward_that_is_not_there_rejected(tmp_path):
    good = write_reward(tmp_path, "return 1")
    for given, said in (("absent.py", "is not a file"), (good + ":other", "has no function other")):
        with pytest.raises(RewardError, match=said):
            load_reward(given)
    with pytest.raises(RewardError, match="cannot be loaded"):
        load_reward(write_reward(tmp_path, ")"))


GREEDY = [
    Evaluated(name, f"/models/{name}", [
        Answers(Answer("text", tokens, cut, score, score == 1, boxed), ()) for tokens, cut, score, boxed in answers
    ])
    for name, answers in {
        "before": [(5, True, 0.0, False), (10, False, 0.5, True), (12, False, 1.0, True)],
        "the other": [(1, False, 1.0, True), (2, False, 0.25, True), (3, False, 1.0, True)],
    }.items()
]  # fmt: skip
"""Two models, three questions and no samples."""


def test_the_table_is_written_to_the_letter():
    """Wilson's intervals for 1 and 2 of 3 are published; differences 1, 0, 0 give an interval from 0 to 1."""
    assert table(GREEDY) == (
        "                                     greedy  boxed   cut  tokens\n"
        "before                 0.333 [0.061, 0.792]   0.67  0.33       9\n"
        "the other              0.667 [0.208, 0.939]   1.00  0.00       2\n"
        "the other - before  +0.333 [+0.000, +1.000]"
    )
    assert table(GREEDY[:1]).count("\n") == 1


def test_shares_are_means_over_greedy_and_sampled_answers():
    assert GREEDY[0].shares() == pytest.approx({"score": 0.5, "boxed": 2 / 3, "cut": 1 / 3, "tokens": 9})
    # BEFORE's correct answers are 1 greedy one, and 1 and 2 of the samples: 4 of 15.
    assert BEFORE.shares() == pytest.approx({"score": 4 / 15, "boxed": 4 / 15, "cut": 0, "tokens": 5})


def test_models_that_drew_other_numbers_of_samples_are_compared_by_what_both_have():
    fewer = model("fewer", "rrr", ["rr", "rw", "ww"])
    assert list(fewer.against(BEFORE)) == ["greedy", "pass@2"] and list(BEFORE.against(GREEDY[0])) == ["greedy"]


def test_the_json_is_written_to_the_letter():
    content = as_json(GREEDY[:1], ASKED[:1], {"seed": 3})
    estimate = {"value": pytest.approx(1 / 3), "low": pytest.approx(0.06149, abs=1e-5)}
    assert content["models"][0]["estimates"]["greedy"] == estimate | {"high": pytest.approx(0.79234, abs=1e-5)}
    assert content["questions"] == [
        {
            "messages": [{"role": "user", "content": "ask 0;"}],
            "truth": "0",
            "source": "arithmetic",
            "answers": {
                "before": {
                    "greedy": {
                        "text": "text", "tokens": 5, "cut": True, "score": 0.0, "right": False, "boxed": False,
                    },
                    "sampled": (),
                }
            },
        }
    ]  # fmt: skip
    assert (content["settings"], content["confidence"]) == ({"seed": 3}, 0.95)
    assert content["models"][0]["name"] == "before" and content["models"][0]["path"] == "/models/before"


def test_a_question_on_the_page_says_who_was_right_and_how_many_samples():
    sample = _sample([BEFORE, AFTER], ASKED[2], 2)
    assert {key: sample[key] for key in ("number", "prompt", "truth", "greedy", "sampled")} == {
        "number": 3,
        "prompt": "ask 2;",
        "truth": "2",
        "greedy": "right → right",
        "sampled": "all",
    }
    kinds = ["greedy", "sample 1", "sample 2", "sample 3", "sample 4"]
    assert [(name, kind) for name, kind, _, _ in sample["answers"]] == [
        (name, kind) for name in ("before", "after") for kind in kinds
    ]
    assert [_sample([BEFORE], ASKED[at], at)["sampled"] for at in range(3)] == ["none", "some", "some"]
    assert _sample(GREEDY, ASKED[0], 0)["sampled"] == "" and _sample(GREEDY, ASKED[0], 0)["greedy"] == "wrong → right"


def test_a_long_question_is_cut_where_a_reward_fails_on_it(tmp_path):
    reward = load_reward(write_reward(tmp_path, "return None"))
    for length, shown in ((60, "x" * 60), (61, "x" * 57 + "...")):
        asked = Question(({"role": "user", "content": "x" * length},), "1", "s", {})
        with pytest.raises(RewardError, match=f"answer to '{shown}': "):
            judge(reward, asked, "1", {})


def test_reward_arguments_equal_those_of_training(tmp_path):
    (tmp_path / "reward.py").write_text("def mine(**given):\n    seen.update(given)\n    return 2\nseen = {}\n")
    reward = load_reward(f"{tmp_path / 'reward.py'}:mine")
    asked = Question(({"role": "user", "content": "q"},), "7", "gsm8k", {"index": 4})
    assert judge(reward, asked, "answer", {"weight": 3}) == (2.0, True)
    assert reward.__globals__["seen"] == {
        "data_source": "gsm8k",
        "solution_str": "answer",
        "ground_truth": "7",
        "extra_info": {"index": 4},
        "weight": 3,
    }


def test_the_curve_is_over_the_number_of_tries_and_begins_at_zero():
    page = render_page([BEFORE, AFTER], ASKED, {"emulated": False})
    assert re.findall(r"<title>(k = .*?)</title>", page, re.S) == [
        "k = 1\nbefore: 0.25\nafter: 0.5833",
        "k = 2\nbefore: 0.4444\nafter: 0.7778",
        "k = 4\nbefore: 0.6667\nafter: 1",
    ]
    ticks = re.findall(r'text-anchor="end">([\d.]+)</text>', page)
    assert ticks == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert "<title>k = " not in render_page(GREEDY, ASKED, {"emulated": False})
