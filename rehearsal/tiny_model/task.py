"""The rehearsal's task: sums, differences and products of two digits, answered in a box."""

from __future__ import annotations

import json
import operator
import random
import re
from dataclasses import dataclass
from pathlib import Path

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SIGNS = tuple(_OPERATIONS)
_PROBLEM = re.compile(r"(?P<left>[0-9])(?P<sign>[-+*])(?P<right>[0-9])")


@dataclass(frozen=True)
class Exercise:
    """One exercise with two digits."""

    left: int
    sign: str
    right: int

    @property
    def problem(self) -> str:
        return f"{self.left}{self.sign}{self.right}"

    @property
    def answer(self) -> str:
        return str(_OPERATIONS[self.sign](self.left, self.right))

    @property
    def mirrored(self) -> Exercise:
        """The same exercise with its digits exchanged."""
        return Exercise(self.right, self.sign, self.left)

    @property
    def solution(self) -> str:
        r"""The exercise written out and its answer in the box: `7*8=\boxed{56}`."""
        return rf"{self.problem}=\boxed{{{self.answer}}}"

    def with_sign(self, sign: str) -> Exercise:
        """The same digits with another sign; a difference may then be negative."""
        return Exercise(self.left, sign, self.right)

    @classmethod
    def parse(cls, problem: str) -> Exercise:
        """Read an exercise as `problem` writes it.

        Raises:
            ValueError: if the text is no exercise.
        """
        match = _PROBLEM.fullmatch(problem)
        if match is None:
            raise ValueError(f'"{problem}" is not an exercise with two digits, such as 7*8')
        return cls(int(match["left"]), match["sign"], int(match["right"]))

    def record(self) -> dict[str, str]:
        """Return the exercise in DeepScaleR's columns."""
        return {"problem": self.problem, "answer": self.answer, "solution": self.solution}


def all_exercises() -> list[Exercise]:
    """Return the 255 exercises: every sum and product of two digits, and every difference that is not negative."""
    return [
        Exercise(left, sign, right)
        for sign in SIGNS
        for left in range(10)
        for right in range(10)
        if sign != "-" or left >= right
    ]


def split_exercises(seed: int, test_count: int = 24) -> tuple[list[Exercise], list[Exercise]]:
    """Split all exercises into disjoint training and test exercises, both shuffled.

    A test exercise is a sum or product whose mirror image (`3*7` for `7*3`) is a training exercise: with so few
    exercises that is the part of arithmetic that can be asked without having been shown.

    Raises:
        ValueError: if there are not `test_count` such exercises.
    """
    generator = random.Random(seed)
    exercises = all_exercises()
    unequal = [exercise for exercise in exercises if exercise.sign != "-" and exercise.left < exercise.right]
    if not 0 < test_count <= len(unequal):
        raise ValueError(f"{test_count} test exercises requested, but only 1 to {len(unequal)} are possible")
    test = [generator.choice((exercise, exercise.mirrored)) for exercise in generator.sample(unequal, test_count)]
    training = [exercise for exercise in exercises if exercise not in set(test)]
    generator.shuffle(training)
    return training, test


def write_records(exercises: list[Exercise], path: Path) -> None:
    """Write one JSON object a line, as `record` gives it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(exercise.record()) + "\n" for exercise in exercises), encoding="utf-8")
