"""Rule-based rewards: a table of cases, and a time limit that must hold."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from post_training.rewards import RULES, has_form, score
from post_training.rewards.answers import compare_plainly, last_boxed, plain
from post_training.rewards.comparison import equal_answers
from post_training.rewards.process import AlgebraProcess, ComparisonLost, ComparisonTimeout
from post_training.rewards.units import quantity
from post_training.rewards.verifier import LONGEST_ANSWER, Verifier
from tests.post_training.rewards.cases import CASES, ENDLESS, RESPONSES

JUDGED_ROWS = Path(__file__).with_name("judged_rows.tsv")
HANGING_WORKER = "import time; print('{\"ready\": true}', flush=True); time.sleep(600)"
DYING_WORKER = "import sys; print('{\"ready\": true}', flush=True); sys.stdin.readline()"


@pytest.fixture(scope="module")
def process():
    process = AlgebraProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def verifier(process):
    return Verifier(time_limit_s=60.0, process=process)


@pytest.fixture
def forbidden_judge():
    """Verifier that fails the test when called, for cases that text and numbers must decide."""
    return Verifier(process=AlgebraProcess(["/nonexistent-worker"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{55}", "55"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 }", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{}", ""),
        (r"first \boxed{3} and \boxed{cut off", "3"),
        ("no box 55", None),
        (r"\boxed{never closed", None),
        ("", None),
    ],
)
def test_last_box_is_found(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("truth", "answer", "expected"),
    [
        ("55", "55", True),
        ("55", "54", False),
        ("55", "55.0", True),
        ("1234", "1,234", True),
        ("-3", "\u22123", True),
        ("0.5", ".5", True),
        ("5", "", False),
        ("12", "1,2", None),
        ("5", r"\frac{10}{2}", True),
        ("1/3", "0.33", False),
        ("1/0", "0", None),
        (r"25\%", "0.25", True),
        ("25", "25%", True),
        (r"25\%", "2.5", False),
        ("1", "9" * 5000, None),
        ("x+1", "1+x", None),
        ("55", "5-", None),
        (r"0.\overline{3}", "1/3", True),
        ("2 1/3", r"\frac{7}{3}", True),
        ("101_2", "101_3", False),
        ("1", "9" * 400, False),
    ],
)
def test_plain_comparison_decides_or_abstains(truth, answer, expected):
    assert compare_plainly(truth, answer) is expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{55}", "55", 1.0),
        (r"\boxed{54}", "55", 0.0),
        ("55", "55", 0.0),
        (r"I count 12: \boxed{7}", "2", 0.0),
        (r"\boxed{1}</think> no: \boxed{2}", "2", 1.0),
        (r"\boxed{2}</think> no box here", "2", 0.0),
        (r"<think> perhaps \boxed{2}", "2", 0.0),
        (r"\boxed{70,000}", "70000", 1.0),
        (r"\boxed{60}", r"\boxed{60}", 1.0),
    ],
)
def test_boxed_rule_without_algebra(forbidden_judge, response, truth, expected):
    assert score(response, truth, forbidden_judge) == expected


TABLE = [(kind, *case) for kind, cases in CASES.items() for case in cases]


@pytest.fixture
def undecided(caplog):
    """Counter of the comparisons that the verifier has given up on so far in this test."""
    return lambda: sum("no result for" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("kind", CASES)
def test_boxed_rule_on_the_table(verifier, kind, undecided):
    found = [
        (truth, answer, score(rf"so \boxed{{{answer}}}", truth, verifier) == 1.0) for truth, answer, _ in CASES[kind]
    ]
    assert found == CASES[kind]
    assert undecided() == 0


def judged_rows(kind):
    """Return (truth, response, score) rows of one kind; a response without a box is put in one."""
    for line in JUDGED_ROWS.read_text().splitlines()[1:]:
        name, right, truth, answer = line.split("\t")
        response = answer.replace("\u23ce", "\n")
        if name == kind:
            yield truth, response if r"\boxed" in response else rf"so \boxed{{{response}}}", float(right)


KINDS = sorted({line.partition("\t")[0] for line in JUDGED_ROWS.read_text().splitlines()[1:]})


@pytest.mark.parametrize("kind", KINDS)
def test_boxed_rule_on_judged_rows(verifier, kind, undecided):
    rows = list(judged_rows(kind))
    assert [(truth, response, score(response, truth, verifier)) for truth, response, _ in rows] == rows
    assert undecided() == 0


def test_there_are_many_judged_rows_of_both_verdicts():
    scores = [score for kind in KINDS for *_, score in judged_rows(kind)]
    assert len(scores) >= 250 and 100 < sum(scores) < len(scores) - 100


def test_the_table_is_large_and_has_both_verdicts():
    assert len(TABLE) + len(RESPONSES) + len(ENDLESS) >= 60
    assert 20 < sum(expected for *_, expected in TABLE) < len(TABLE) - 20


@pytest.mark.parametrize("name", RESPONSES)
def test_boxed_rule_on_whole_responses(verifier, name):
    response, truth, expected = RESPONSES[name]
    assert score(response, truth, verifier) == expected


@pytest.mark.slow
def test_endless_comparisons_end_at_the_limit_and_the_worker_stays(process, undecided):
    verifier, patient = Verifier(0.5, process), Verifier(60.0, process)
    assert patient.equal(r"\sqrt{4}", "2")
    template = process._process.pid
    for truth, answer in ENDLESS:
        assert not verifier.equal(truth, answer), answer[:40]
        assert process._process.pid == template and process._process.poll() is None
    assert undecided() == len(ENDLESS)
    assert patient.equal(r"\sqrt{9}", "3") and process._process.pid == template


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (r"\boxed{60}", "60"),
        ("$5$", "5"),
        ("5.", "5"),
        (r"1\,234\!567{,}890", "1234567890"),
        (r"\sin\, x", r"\sin x"),
        (r"12\, 34", "12 34"),
        ("$", "$"),
        ("", ""),
    ],
)
def test_decoration_of_a_value_is_removed(answer, expected):
    assert plain(answer) == expected


@pytest.mark.parametrize(
    ("answer", "value", "has_unit"),
    [("12 cm", "12", True), ("x m", "x m", False), ("m", "m", False), ("5", "5", False), ("$5", "5", True)],
)
def test_a_unit_stands_behind_a_number(answer, value, has_unit):
    found = quantity(answer)
    assert (found.value, found.unit is not None) == (value, has_unit)


@pytest.mark.parametrize(
    ("said", "power"),
    [("cu cm", 3), ("cubic cm", 3), ("cm cubed", 3), ("sq cm", 2), ("square cm", 2), ("cm squared", 2), ("cm", 1)],
)
def test_the_power_of_a_unit_is_read_before_and_behind_it(said, power):
    found = quantity(f"12 {said}").unit
    assert found is not None and found.dimension == (("m", power),)


def test_substring_rule_keeps_its_known_weakness(verifier):
    assert score(r"I count 12: \boxed{7}", "2", verifier, rule="substring") == 1.0
    assert score(r"\boxed{0.5}", r"\frac{1}{2}", verifier, rule="substring") == 0.0
    assert score(r"I count 12: \boxed{7}", "2", verifier, rule="boxed") == 0.0


def test_unknown_rule_names_the_known_ones(verifier):
    assert set(RULES) == {"boxed", "geo3k", "gsm8k", "substring"}
    with pytest.raises(ValueError, match=f"Choose one of: {', '.join(RULES)}"):
        score("", "", verifier, rule="exact")


def test_limit_must_be_positive():
    with pytest.raises(ValueError, match="above 0"):
        Verifier(time_limit_s=0)


def evaluator_of(process):
    """Return the process ID of the evaluator, the template's only child."""
    template = process._process.pid
    (evaluator,) = Path(f"/proc/{template}/task/{template}/children").read_text().split()
    return int(evaluator)


def test_stopped_evaluator_is_killed_and_later_samples_are_judged(process):
    assert process.equal(r"\frac12", "0.5", limit_s=60)
    template, evaluator = process._process.pid, evaluator_of(process)
    os.kill(evaluator, signal.SIGSTOP)  # simulates a computation that never finishes
    with pytest.raises(ComparisonTimeout):
        process.equal("1", "x", limit_s=0.2)
    assert process.equal(r"\frac12", "0.5", limit_s=60)
    assert process._process.pid == template and evaluator_of(process) != evaluator
    assert not os.path.exists(f"/proc/{evaluator}")


def test_late_reply_is_not_used_for_the_next_request(process):
    assert process.equal("x+1", "1+x", limit_s=60)
    evaluator = evaluator_of(process)
    os.kill(evaluator, signal.SIGSTOP)
    with pytest.raises(ComparisonTimeout):
        process.equal("x", "x", limit_s=0.1)
    os.kill(process._process.pid, signal.SIGSTOP)
    # The template cannot act yet, so the old evaluator answers the abandoned request.
    try:
        os.kill(evaluator, signal.SIGCONT)
    except ProcessLookupError:
        pass
    os.kill(process._process.pid, signal.SIGCONT)
    assert not process.equal("x", "y", limit_s=60)


def test_killed_evaluator_costs_one_sample_and_no_start(process):
    assert process.equal("x+1", "1+x", limit_s=60)
    template, evaluator = process._process.pid, evaluator_of(process)
    os.kill(evaluator, signal.SIGKILL)
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(process.equal("x+1", "1+x", limit_s=60))
        except ComparisonLost:
            outcomes.append("lost")
    assert outcomes in (["lost", True, True], [True, True, True]) and process._process.pid == template


def test_killed_template_is_started_again(process):
    assert process.equal("x+1", "1+x", limit_s=60)
    evaluator = evaluator_of(process)
    process._process.kill()
    process._process.wait()
    assert process.equal("x+1", "1+x", limit_s=60) and evaluator_of(process) != evaluator


def test_memory_of_an_evaluator_is_limited(process):
    assert process.equal("x+1", "1+x", limit_s=60)
    limits = Path(f"/proc/{evaluator_of(process)}/limits").read_text().splitlines()
    (line,) = [line for line in limits if line.startswith("Max address space")]
    assert line.split()[3] == str(4 * 1024**3)


def test_forked_process_asks_a_worker_of_its_own(process):
    assert process.equal("x+1", "1+x", limit_s=60)
    template = process._process.pid
    child = os.fork()
    if child == 0:
        answered = process.equal("x+1", "1+x", limit_s=60) and process._process.pid != template
        process.close()
        os._exit(0 if answered else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process._process.pid == template and process.equal("x+2", "2+x", limit_s=60)


def test_prepared_worker_serves_the_first_comparison():
    process = AlgebraProcess()
    process.prepare()
    prepared = process._process
    assert process.equal(r"\frac12", "0.5", limit_s=60) and process._process is prepared
    process.close()


def test_worker_that_dies_of_a_sample_makes_it_wrong(undecided):
    verifier = Verifier(5.0, AlgebraProcess([sys.executable, "-c", DYING_WORKER]))
    assert not verifier.equal("1", "x") and undecided() == 0


def test_hanging_worker_is_given_up_at_the_limit(undecided):
    process = AlgebraProcess([sys.executable, "-c", HANGING_WORKER])
    verifier = Verifier(0.2, process)
    assert not verifier.equal("1", "x") and not verifier.equal("1", "y") and undecided() == 2
    process.close()


def test_worker_that_cannot_start_is_an_error():
    with pytest.raises(RuntimeError, match="did not start"):
        AlgebraProcess([sys.executable, "-c", "raise SystemExit(1)"]).equal("1", "x", limit_s=1)


class CountingProcess:
    """Stand-in process that calls every pair equal and counts its calls."""

    def __init__(self):
        self.asked = []

    def equal(self, truth, answer, limit_s):
        self.asked.append((truth, answer))
        if answer == "endless":
            raise ComparisonTimeout
        return True


def test_a_pair_is_compared_once(undecided):
    process = CountingProcess()
    verifier = Verifier(1.0, process)
    assert [verifier.equal("1", answer) for answer in ("x", "y", "x", "endless", "endless")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    assert process.asked == [("1", "x"), ("1", "y"), ("1", "endless")] and undecided() == 1


def test_threads_that_ask_for_one_pair_wait_for_one_comparison(undecided):
    """Otherwise an endless comparison would use up its limit once per thread."""
    begun, go_on = threading.Event(), threading.Event()

    class SlowProcess(CountingProcess):
        def equal(self, truth, answer, limit_s):
            begun.set()
            assert go_on.wait(60)
            return super().equal(truth, answer, limit_s)

    process, verdicts = SlowProcess(), []
    verifier = Verifier(1.0, process)
    threads = [threading.Thread(target=lambda: verdicts.append(verifier.equal("1", "endless"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    go_on.set()
    for thread in threads:
        thread.join()
    assert process.asked == [("1", "endless")] and undecided() == 1
    assert verdicts == [False] * 8


def test_an_error_is_not_remembered():
    class BrokenOnce(CountingProcess):
        def equal(self, truth, answer, limit_s):
            if super().equal(truth, answer, limit_s) and len(self.asked) == 1:
                raise RuntimeError("no process")
            return True

    verifier = Verifier(1.0, BrokenOnce())
    with pytest.raises(RuntimeError, match="no process"):
        verifier.equal("1", "x")
    assert verifier.equal("1", "x")


@pytest.mark.parametrize(
    "part",
    [
        " ",
        "{",
        r"\text{",
        r"\text{a}",
        r"\mathrm{cm}",
        r"\ ",
        "cm ",
        "abcd ",
        "/",
        "^",
        r"\circ",
        "[1,",
        "]",
        "=",
        r"\cup",
        "(A)",
        "%",
    ],
)
def test_long_answers_are_taken_apart_in_linear_time(part):
    """There is no time limit outside the worker, so a backtracking pattern would hang on these."""
    process = CountingProcess()
    for answer in (part * LONGEST_ANSWER, "5" + part * LONGEST_ANSWER, "5" + part * LONGEST_ANSWER + "!"):
        for cut in (answer[:LONGEST_ANSWER], answer[: LONGEST_ANSWER - 1] + "!"):
            assert equal_answers("7", cut, Verifier(1.0, process)) in (True, False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("truth", ["", " ", "nan", "NaN", r"\boxed{}", "$$"])
def test_a_truth_that_is_none_is_met_by_no_response(forbidden_judge, rule, truth):
    for response in (r"\boxed{}", r"\boxed{nan}", r"nan \boxed{NaN}", "", truth):
        assert score(response, truth, forbidden_judge, rule) == 0.0


def test_answers_longer_than_any_answer_are_wrong_without_algebra():
    process = CountingProcess()
    assert Verifier(1.0, process).equal("1", "x" * LONGEST_ANSWER)
    assert not Verifier(1.0, process).equal("1", "x" * (LONGEST_ANSWER + 1))
    assert len(process.asked) == 1


def test_worker_outlives_the_thread_that_started_it(process):
    thread = threading.Thread(target=process.equal, args=("x+1", "1+x", 60))
    thread.start()
    thread.join()
    template = process._process.pid
    assert process.equal("x+2", "2+x", limit_s=60) and process._process.pid == template


def test_worker_ends_with_its_parent():
    parent = (
        "import os, signal\n"
        "from post_training.rewards.process import AlgebraProcess\n"
        "process = AlgebraProcess()\n"
        "process.equal('x', 'y', 60)\n"
        "template = process._process.pid\n"
        "evaluator = open(f'/proc/{template}/task/{template}/children').read()\n"
        "os.kill(int(evaluator), signal.SIGSTOP)\n"
        "print(template, evaluator, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    finished = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True)
    deadline = time.monotonic() + 30
    for worker in map(int, finished.stdout.split()):
        while os.path.exists(f"/proc/{worker}") and not _is_zombie(worker):
            assert time.monotonic() < deadline, "the worker outlived its parent"


def _is_zombie(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("6*3 is 18\n#### 18<|im_end|>", "18", True),
        (f"#### {'1' * 5000}", "1" * 4096, False),  # the truncated digits count
        ("#### 3 no, wait\n#### 18", "18", True),  # verl's rule takes the first answer
        ("#### 18.", "18", True),  # verl's rule keeps the full stop
        ("#### $1,000.00", "1000", True),
        ("#### -5", "-5", True),
        ("#### 18", "81", False),
        ("<think>#### 18</think>it is so", "18", False),
        (r"\boxed{18}", "18", False),
        ("18", "18", False),
        ("####", "18", False),
        ("#### " * 10_000 + "7", "18", False),
    ],
)
def test_the_number_after_the_last_mark_counts(forbidden_judge, response, truth, right):
    assert score(response, truth, forbidden_judge, "gsm8k") == float(right)


@pytest.mark.parametrize(
    ("rule", "response", "form"),
    [
        ("boxed", r"\boxed{wrong}", True),
        ("boxed", "#### 18", False),
        ("gsm8k", "#### 18", True),
        ("gsm8k", r"\boxed{18}", False),
        ("substring", "anything", True),
    ],
)
def test_the_form_is_judged_apart_from_the_answer(rule, response, form):
    assert has_form(response, rule) == form
