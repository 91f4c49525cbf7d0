"""Build the rows that verl's data loader and reward manager expect, and split them into training and test rows."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from post_training.data.records import INSTRUCTION, THINKING_INSTRUCTION, DataError, Problem

Item = TypeVar("Item")


def to_row(problem: Problem, index: int, split_name: str, data_source: str | None, instruction: str) -> dict[str, Any]:
    """Return one row with verl's columns: data_source, prompt, ability, reward_model and extra_info.

    A ``data_source`` of None stands for the problem's own source.

    ``prompt`` is a chat of one user message: the question, a space, and ``instruction`` (nothing when it is empty).
    ``extra_info.index`` is the row's number in its file and names the sample in verl's batches.
    """
    content = f"{problem.question} {instruction}" if instruction else problem.question
    return {
        "data_source": data_source or problem.source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split_name, "index": index, "question": problem.question, "solution": problem.solution},
    }


def to_image_row(
    question: str, answer: str, images: Sequence[bytes], index: int, split_name: str, data_source: str, instruction: str
) -> dict[str, Any]:
    """Return one row with images under `parquet.IMAGE_SCHEMA`, as verl's geo3k.py makes it.

    ``question`` contains ``<image>`` at the place of each of the encoded ``images``.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": f"{question} {instruction}" if instruction else question}],
        "images": [{"bytes": image, "path": None} for image in images],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split_name, "index": index, "answer": answer, "question": question},
    }


def to_rows(
    problems: Sequence[Problem], split_name: str, data_source: str | None, instruction: str | None
) -> list[dict[str, Any]]:
    """Return a row for each problem, with images if the problems have some; None selects the default of their kind.

    Raises:
        DataError: some problems have images and some have none, which one file cannot combine.
    """
    with_images = sum(bool(problem.images) for problem in problems)
    if 0 < with_images < len(problems):
        raise DataError(
            f"{with_images} of {len(problems)} records have images, but verl reads images in all rows of a file or in "
            "none. Put the others into a separate file."
        )
    if not with_images:
        words = INSTRUCTION if instruction is None else instruction
        return [to_row(each, at, split_name, data_source, words) for at, each in enumerate(problems)]
    words = THINKING_INSTRUCTION if instruction is None else instruction
    return [
        to_image_row(each.question, each.answer, each.images, at, split_name, data_source or each.source, words)
        for at, each in enumerate(problems)
    ]


def split(items: Sequence[Item], test_count: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Shuffle ``items`` and split them into training and test items; the same seed gives the same two lists.

    Raises:
        DataError: ``test_count`` is below 1 or leaves no item for training.
    """
    if not 1 <= test_count < len(items):
        raise DataError(
            f"{test_count} of {len(items)} records were requested as test data, but at least 1 test record and 1 "
            "training record are needed."
        )
    shuffled = random.Random(seed).sample(items, len(items))
    return shuffled[test_count:], shuffled[:test_count]
