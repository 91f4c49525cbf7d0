r"""The last box of a text; here without braces, as MATH writes ``$\boxed 5$``."""

import pytest

from post_training.rewards import score
from post_training.rewards.answers import last_boxed
from post_training.rewards.process import AlgebraProcess
from post_training.rewards.verifier import Verifier

IN_A_FORMULA = [
    (r"so $\boxed 5$.", "5"),
    (r"so $\boxed 2\sqrt{3}$.", r"2\sqrt{3}"),
    (r"so $\boxed \frac{1}{2}.$ Done", r"\frac{1}{2}"),
    (r"so $\boxed\frac{1}{2}$, as $x>0$", r"\frac{1}{2}"),
    (r"so $\boxed -\frac{3}{4}$", r"-\frac{3}{4}"),
    (r"so $x = \boxed \text{(A)}$", r"\text{(A)}"),
    (r"so $\boxed 1,2$", "1,2"),
    (r"so $\boxed 5!$", "5!"),
    (r"so $\boxed \{1,2\}$", r"\{1,2\}"),
    (r"so \(\boxed 2\pi\), and \(x\)", r"2\pi"),
    (r"so $$\boxed 2\pi$$", r"2\pi"),
    ("\\[\n\\boxed 2\\pi \\\\\n\\]", r"2\pi"),
    ("$$\n\\boxed 7 \\text{ cm}\n$$", r"7 \text{ cm}"),
    (r"so $\boxed 1 + \text{ if $n$ is even}$", r"1 + \text{ if $n$ is even}"),
    (r"so $\text{it is \boxed 7}$", "7"),
    (r"$a$$b$ and $\boxed 3\pi$$x$", r"3\pi"),
    (r"so $\boxed{3}$, or $\boxed 2\sqrt{3}$", r"2\sqrt{3}"),
    (r"so $\boxed 2\sqrt{3}$, or \fbox{3}", "3"),
    (r"so $\boxed 3 \boxed 4$", "4"),
    (r"so $\boxed \boxed{7}$", "7"),
    (r"a matrix \\[2pt] and \boxed 7", "7"),
    (r"a price of \$5 and \boxed 7 cents, $x$", "7"),
    ("a price of $5\n\nand \\boxed 7 cents, $x$", "7"),
    ("a price of $5 and \\boxed 7 cents\nof \\$9", "7"),
]
ALONE = [
    (r"so \boxed 7.", "7"), (r"so \boxed 7 apples are left", "7"), (r"so \boxed -7", "-7"), (r"so \boxed 1/2.", "1/2"),
    (r"so \boxed 1,234.50, as asked", "1,234.50"), (r"so \boxed 50\%.", r"50\%"), (r"so \boxed B", "B"),
    (r"**\boxed 7**", "7"), (r"so \boxed 7$", "7"), (r"so \boxed 7\)", "7"), ("so \\boxed 7\n- eggs", "7"),
    (r"so \boxed 7<|im_end|>", "7"), (r"| sum | \boxed 7 |", "7"), (r"so \boxed7", "7"),
]  # fmt: skip
UNCLEAR = [
    r"\boxed 2\sqrt{3}", r"\boxed \frac{1}{2}", r"\boxed -\frac{3}{4}", r"\boxed 7 + 1", r"\boxed 7*3", r"\boxed 7 * 3",
    r"\boxed 2^{10}", r"\boxed 7 \text{ cm}", r"\boxed 5!", r"\boxed 2(x+1)", r"\boxed 1,2", r"\boxed 1, 2",
    r"\boxed 3x", r"\boxed x = 5", r"\boxed x \le 5", r"\boxed 3:4", r"$\boxed 2\sqrt{3}", r"$\boxed$",
    r"\\boxed 2\\sqrt{3}", r"\boxed as asked",
]  # fmt: skip


@pytest.mark.parametrize(("text", "content"), IN_A_FORMULA + ALONE)
def test_box_without_braces_ends_with_its_formula(text, content):
    assert last_boxed(text) == last_boxed(text, strict=True) == content


@pytest.mark.parametrize("text", UNCLEAR)
def test_box_with_unclear_end_does_not_count(text):
    assert last_boxed(f"so {text}") is None
    assert last_boxed(rf"so \boxed{{4}}, or {text}") == "4"
    assert last_boxed(rf"so \boxed{{4}}, or {text}", strict=True) is None
    assert last_boxed(rf"so {text}, or \boxed{{4}}", strict=True) == "4"


def test_box_without_braces_is_scored_as_a_whole():
    verifier = Verifier(process=AlgebraProcess(["/nonexistent-worker"]))
    assert score(r"so $\boxed 2\sqrt{3}$.", r"2\sqrt{3}", verifier) == 1.0
    assert score(r"so $\boxed 50\%$.", "50", verifier) == 1.0
    assert score(r"so \boxed 2\sqrt{3}.", "2", verifier) == 0.0


@pytest.mark.parametrize(
    "part", [r"\boxed ", r"$\boxed ", r"\boxed 7", "1", "1,111", " ", "\n", "$", r"$\boxed{ ", r"\boxed 1, ", ".", "\\"]
)
def test_boxes_are_found_in_linear_time(part):
    """Otherwise this does not end within the limit of a test."""
    assert last_boxed(r"$\boxed 1" + part * (400_000 // len(part)) + r" \boxed{4}") == "4"
