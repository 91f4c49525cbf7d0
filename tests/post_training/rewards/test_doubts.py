"""Texts behind an answer without ``</think>``: doubts, the prose of a finished response, and texts that break off."""

import pytest

from post_training.rewards.doubts import breaks_off, doubts, is_doubted
from post_training.rewards.rules import boxed_answer, marked_answer

# Each pair has the same words, once as a thought and once as a part of an answer.
DOUBTS = {
    "wait": ("Wait, there are two cases.", "So the waiter waits in line, wait, and the waiting takes an hour."),
    "but wait": ("But wait... the ends count too.", "They have to wait."),
    "wait no": ("Wait no, 3 is odd.", "Wait for the bus until 8:00."),
    "wait label": ("Wait: both roots are negative.", "- Wait: 5 minutes\n- Ride: 13 minutes\nWait-list: none."),
    "hmm": ("Hmm, n may be 0.", "The HMM has two hidden states."),
    "hold on": ("Hold on, n may be 0.", "Passengers hold on to the rail, and hold on tight."),
    "not sure": ("I'm not sure about the last step.", "If you are not sure, draw the triangle."),
    "double-check": ("I'll double-check the sum.", "You can double-check it by substitution."),
    "scratch that": ("Scratch that, x is positive.", "Do not scratch that surface."),
    "no": ("\n\nNo, the angle is obtuse.", "There is no, or almost no, difference between both methods."),
    "on second thought": ("On second thought, it is 6.", "She gave on second thought, and gladly, the other half."),
    "let me": ("Let me verify this.", "Please let me know! Let me summarize the steps."),
    "let's": ("Let\u2019s verify: 2+2 is 4.", "Let's seek further problems together."),
    "but is": ("But is this the largest one?", "It is small, but is positive."),
    "but what": ("But what if n is 1?", "It helps, but what matters is the unit."),
    "but how": ("But how about negative n?", "He pays, but how he pays is another matter."),
    "but let": ("But let me see.", "It holds, but let n be positive there."),
    "but this": ("But this cannot be right.", "Note that, but this is important, the eggs are fresh."),
    "should i": ("Should I check x = 0?", "The price should increase, and each index should I think start at 1."),
    "am i": ("Am I missing a case?", "I am interested in more problems like this!"),
    "i should": ("I should check the other case.", "The index i should run from 1 to 18, I should add."),
    "i need to": ("I need to recheck the sum.", "So I need to buy 18 tiles."),
    "is that right": (
        "Is that right? 2 and 3 are coprime.",
        "The height of it is right of the base; only there is it correct, is it?",
    ),
    "等等": ("。等等，还有一种情况。", "他买了苹果、梨等等，一共 18 元。"),
    "等一下": ("\n等一下，x 可以是 0。", "小明等一下午的车。"),
    "不对": ("，不对，应该是 6。", "这个图形不对称，左右不对应。"),
    "这不对": ("。这好像不太对。", "如果发现哪里不对，请告诉我。"),
    "也许": ("。也许我漏了一种情况。", "也许你还想做一道类似的题。"),
    "或许": ("。我或许弄错了符号。", "或许还有更快的解法。"),
    "让我": ("。让我再验算一遍。", "这道题让我们学会了因式分解。"),
    "再检查": ("，我再检查一下。", "交卷前请再检查一遍单位。"),
    "再算": ("。我再算一次。", "用另一种方法再算也一样。"),
    "重新": ("。我需要重新计算面积。", "重新计算也一样。"),
    "是不是": ("。我是不是漏了一个根？", "小明是不是很聪明？"),
    "是否正确": ("。这个答案是否正确？", "代入原方程即可检验是否正确。"),
}


@pytest.mark.parametrize("kind", DOUBTS)
def test_words_of_doubt_told_from_prose(kind):
    thought, prose = DOUBTS[kind]
    for answer in (r"So \boxed{18}", r"$\boxed{18}$.", "#### 18\n"):
        assert doubts(f"{answer} {thought}", 0), thought
        assert not doubts(f"{answer} {prose}", 0), prose


@pytest.mark.parametrize("prose", [prose for _, prose in DOUBTS.values()])
def test_answer_before_prose_is_kept(prose):
    assert boxed_answer(rf"We get \boxed{{18}}. {prose}") == "18"
    assert marked_answer(f"9 * 2 = 18\n#### 18\n{prose}") == "18"


@pytest.mark.parametrize(
    "behind",
    [
        ", wait, that counts both ends", " — wait, that counts both ends", ". **Wait**, that counts both ends",
        ". Oh wait! That counts both ends", ". No, wait. That counts both ends", ".\nWait", ".\n\nHmm...",
        ". Hmm, but that counts both ends", "$, no, that counts both ends", ". Not sure if both ends count",
        ". Hold on a second. That counts both ends", "，等等，再检查一下", "。不对。两端都算了",
    ],
)  # fmt: skip
def test_interjection_behind_answer_is_doubt(behind):
    assert is_doubted(rf"So $\boxed{{18}}{behind}", len("So $"))


SENTENCE = "Therefore, Janet makes eighteen dollars every day at the farmers' market"
ENDS = [
    f"{SENTENCE}.", f"**{SENTENCE}**", f"*{SENTENCE}.*", "Janet makes a total of **$18 every day at the market**",
    f'"{SENTENCE}"', f"“{SENTENCE}.”", f"'{SENTENCE}.'", f"({SENTENCE})", f"[{SENTENCE}]", f"{SENTENCE} :)",
    f"{SENTENCE} \U0001f60a", f"{SENTENCE}! \u2705\ufe0f", f"{SENTENCE} \u220e", f"{SENTENCE} ~", f"<b>{SENTENCE}</b>",
    f"{SENTENCE}<|im_end|>", f"{SENTENCE}</s>", f"{SENTENCE}<\uff5cend\u2581of\u2581sentence\uff5c>",
    "Summary of the day:\n- Eggs laid: 16\n- Eggs eaten: 3\n- Total revenue: 18 dollars",
    "These are the steps of it:\n1. Subtract what she eats and bakes\n2. Multiply the rest by the price",
    "| step | value |\n|---|---|\n| eggs that are sold | 9 |\n| dollars for all of them | 18 |",
    "The number of eggs that are left for the market is 16 - 3 - 4 = 9",
    "The money that she gets for all of them is 9 * 2 = 18 dollars",
    "Nine eggs are left for the market every day.\n\nFinal answer: 18 dollars",
    "Nine eggs are left for the market every day.\n\n**The answer is** 18 dollars",
    "Nine eggs are left for the market every day.\n\n答案：18 元",
    f"{SENTENCE}. ~ eggcounter", f"{SENTENCE}.\n~Anna Smith (revised)", f"{SENTENCE}.\n-Anna", f"{SENTENCE}.\n— Anna",
    f"{SENTENCE}.\nEdit by anna: the price is in dollars", f"{SENTENCE}.\n\nBest regards,\nYour tutor",
    "In symbols this is the product of nine and two: \\[9 \\cdot 2 = 18\\]",
    "所以珍妮特 每天 在 市场 上 卖 鸡蛋 挣 到 18 元？",
    "The same as a program:\n```python\nprint((16 - 3 - 4) * 2)\n```", f"{SENTENCE}.\n\n---",
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_finished_text_behind_answer_is_kept(end):
    assert boxed_answer(rf"She sells 9 eggs: \boxed{{18}}.{chr(10)}{end}") == "18"


@pytest.mark.parametrize(
    "end",
    [
        SENTENCE, f"{SENTENCE},", f"{SENTENCE}, which is the", f"{SENTENCE} and we would get **",
        f'{SENTENCE}, which she calls "', f"{SENTENCE} (", "Next we look at both of the cases in turn:",
        "We look at both of the cases in turn:\n- In the first case the number of eggs is",
        "We look at both of the cases in turn:\n1. The eggs that are left for the market, and",
        "We look at both of the cases in turn:\n-", "**Second case** in which the number of eggs at the market",
        "The number of eggs that are left for the market is 16 - 3 - 4 =",
        "Thanks to the nine eggs that are left for the",
        "The number of eggs that are left is 16 - 3 - 4 = 9 and", "If ~ marks the eggs that are left ~ then the",
        "The price of all eggs at the market is **two dollars** for each of the first",
        "The answer is then the sum of the",
    ],
)  # fmt: skip
def test_text_that_breaks_off_is_a_thought(end):
    assert breaks_off(end)
    assert boxed_answer(rf"She sells 9 eggs: \boxed{{18}}.{chr(10)}She could also sell none. {end}") is None


@pytest.mark.parametrize("attempt", ["Maybe the other root", "Another way to see", "也许 x", "或许还有"])
def test_new_attempt_that_breaks_off_is_a_thought(attempt):
    assert boxed_answer(rf"\boxed{{18}}. {attempt}") is None
    assert boxed_answer(rf"\boxed{{18}}. {attempt} is possible.") == "18"


@pytest.mark.parametrize("part", ["\n", " ", "Wait ", "but is this ", "$ ", "*", "= 1", "~ a ", "我", "I "])
def test_doubts_are_found_in_linear_time(part):
    """Otherwise this does not end within the limit of a test."""
    text = r"\boxed{18}" + part * (200_000 // len(part))
    assert is_doubted(text, 0) in (True, False) and is_doubted(f"{text}\nWait, let me check that.", 0)
