"""Seeded random answers like those of a degenerating model, and a program that scores many of them.

python -m tests.post_training.rewards.degenerate FIRST COUNT CPU_SECONDS    # exits 0, or is killed at its limit
"""

import random
import resource
import sys

from post_training.rewards import counts, score
from post_training.rewards.verifier import Verifier

_PIECES = (
    "squared cubed km cm^2 per / million half quarters and or 5 7 0 12. 1,000 - + = < > \\le \\ge ( ) [ ] "
    "{ } \\{ \\} $ $$ \\$ % ^ _ & \\\\ \\, \\; \\quad \\ ~ \\text{ } \\text{cm} \\text{or} \\boxed{ "
    "\\fbox{ \\frac{1}{2} \\frac{ \\sqrt{ \\sqrt( sqrt( sin( pi * ** # #### ####\\n \\pmod{7} \\pmod "
    "\\equiv mod 3 x y ABC A , ; : | \\mid \\cup \\in \\mathbb{R} \\begin{cases} \\end{cases} x=1 x>2 "
    "<think> </think> \u5143 \u4e07 \u5c0f\u65f6 \u5206 \uff17 \uff0c \u3001 \u6216 \u5e73\u65b9 10^{3} "
    "\\times e5 1.5e3 0.\\overline{3} 101_2 \\color{red} Answer: ** ` \" ' . ! \\! \\left( \\right) "
    "\u221a \xb2 \\n \\t wait Hmm \\infty \\emptyset (A) \\textbf{(C)} below zero degrees ^\\circ not is "
    "the answer"
).split(" ")
_LENGTHS = (3, 20, 50, 1000, 5000)
_LONG = 1_000_000
TRUTHS = (
    "7",
    r"\frac{1}{2}",
    r"12\text{ cm}",
    r"x \equiv 3 \pmod{7}",
    "(1,2)",
    "Monday",
    "x>2",
    "5 million",
    r"\mathbb{R}",
    "34元",
)


def degenerate(seed: int) -> tuple[str, str, str]:
    """Return a seed's (response, truth, rule); the response is repetitive, nested, mixed, or a megabyte long."""
    draw = random.Random(seed)
    pieces = [
        piece.replace("\\n", "\n").replace("\\t", "\t") for piece in draw.choices(_PIECES, k=draw.choice((1, 1, 2, 3)))
    ]
    part = draw.choice(("", " ")).join(pieces) + draw.choice(("", " "))
    times = _LONG // max(len(part), 1) if seed % 500 == 0 else draw.choice(_LENGTHS)
    kind = draw.randrange(4)
    if kind == 0:
        content = f"7 {part * times}"
    elif kind == 1:
        content = part * times + "7"
    elif kind == 2:
        content = rf"{draw.choice(_PIECES)}{part}" * (times // 2) + "7" + "}" * (times // 2)
    else:
        content = "".join(draw.choice(_PIECES) + draw.choice(("", " ")) for _ in range(min(times, 2000)))
    rule = draw.choice(("boxed", "boxed", "boxed", "gsm8k", "substring"))
    response = (
        f"#### {content}"
        if rule == "gsm8k"
        else draw.choice((rf"so \boxed{{{content}}}", rf"\boxed{{{content}", content))
    )
    truth = draw.choice(TRUTHS)
    return (response, truth, rule) if draw.random() < 0.8 else (response, content[:5000], rule)


class Undecided:
    """Stand-in for the algebraic verifier that counts its calls and accepts no answer."""

    asked = 0

    def equal(self, truth: str, answer: str, limit_s: float) -> bool:
        """Return False."""
        self.asked += 1
        return False


def main(first: int, count: int, cpu_s: int) -> None:
    """Score the answers of `count` seeds; the kernel kills this process at `cpu_s` seconds of CPU time or 2 GiB."""
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    process = Undecided()
    verifier = Verifier(1.0, process)
    for seed in range(first, first + count):
        response, truth, rule = degenerate(seed)
        assert score(response, truth, verifier, rule) in (0.0, 1.0)
    taken = counts.take()
    print(taken, process.asked, f"{resource.getrusage(resource.RUSAGE_SELF).ru_utime:.1f} s", flush=True)
    sys.exit(1 if any(taken.values()) else 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
