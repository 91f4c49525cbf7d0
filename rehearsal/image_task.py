r"""The task of the multi-modal rehearsal: count, colour and side of a few shapes, answered by one word in a box.

An image has 56x56 pixels, which the processor of Qwen2.5-VL leaves as they are: 16 patches, merged to 4 vision tokens.
One to four equal shapes of one colour lie at one side of it, away from the corners, so that every question has exactly
one answer.
"""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from PIL import Image, ImageDraw

from post_training.data import INSTRUCTION, to_image_row
from post_training.data.parquet import IMAGE_SCHEMA, write_files

DATA_SOURCE = "shapes"
QUESTIONS = {"count": "How many shapes?", "colour": "Which colour?", "side": "Which side?"}
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}
SIDES = ("left", "right", "top", "bottom")
SHAPES = ("square", "circle")
LARGEST_COUNT = 4
IMAGE_SIZE = 56

# The mean colour with which Qwen2.5-VL's processor normalises: empty space is about 0 to the vision tower.
_BACKGROUND = (123, 117, 104)
_CELL = 7
_CELLS_ACROSS, _CELLS_ALONG = 2, 4
_TEST_SHARE = 8
# With their test exercises these are all pictures.
_MOST_ROWS = 4608


@dataclass(frozen=True)
class Picture:
    """Equal shapes of one colour in some of the cells at one side of the image.

    Attributes:
        side: one of `SIDES`; the shapes lie in its outer quarter and in the middle half of its length.
        cells: indices of the occupied cells of the side, of `_CELLS_ACROSS` * `_CELLS_ALONG`.
    """

    colour: str
    side: str
    shape: str
    cells: tuple[int, ...]

    def answer(self, question: str) -> str:
        """Return the answer to a key of `QUESTIONS`."""
        return {"count": str(len(self.cells)), "colour": self.colour, "side": self.side}[question]

    def draw(self) -> Image.Image:
        """Draw the image, RGB, `IMAGE_SIZE` pixels wide and high."""
        image = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), _BACKGROUND)
        canvas = ImageDraw.Draw(image)
        draw = canvas.rectangle if self.shape == "square" else canvas.ellipse
        for cell in self.cells:
            left, top = self._corner(cell)
            draw((left + 1, top + 1, left + _CELL - 2, top + _CELL - 2), fill=COLOURS[self.colour])
        return image

    def png(self) -> bytes:
        """Return the image as PNG; equal pictures give equal bytes."""
        content = io.BytesIO()
        self.draw().save(content, format="PNG")
        return content.getvalue()

    def _corner(self, cell: int) -> tuple[int, int]:
        """Return the left and upper pixel of a cell."""
        along, across = divmod(cell, _CELLS_ACROSS)
        along = (IMAGE_SIZE - _CELLS_ALONG * _CELL) // 2 + along * _CELL
        across *= _CELL
        if self.side in ("right", "bottom"):
            across += IMAGE_SIZE - _CELLS_ACROSS * _CELL
        return (across, along) if self.side in ("left", "right") else (along, across)


@dataclass(frozen=True)
class ImageExercise:
    """One question, a key of `QUESTIONS`, about one picture."""

    picture: Picture
    question: str

    @property
    def problem(self) -> str:
        """The question as the prompt asks it, with the image before it."""
        return f"<image>{QUESTIONS[self.question]}"

    @property
    def answer(self) -> str:
        """The right word or digit."""
        return self.picture.answer(self.question)

    def solution(self, read_as: str | None = None) -> str:
        r"""Return the response `\boxed{red}`; with `read_as`, that to another question about the picture."""
        return rf"\boxed{{{self.picture.answer(read_as or self.question)}}}"


def all_pictures() -> list[Picture]:
    """Return all 5184 pictures."""
    cells = range(_CELLS_ACROSS * _CELLS_ALONG)
    occupied = [chosen for count in range(1, LARGEST_COUNT + 1) for chosen in combinations(cells, count)]
    return [
        Picture(colour, side, shape, chosen)
        for colour in COLOURS
        for side in SIDES
        for shape in SHAPES
        for chosen in occupied
    ]


def draw_exercises(seed: int, rows: int) -> tuple[list[ImageExercise], list[ImageExercise]]:
    """Draw `rows` training exercises and an eighth as many test exercises, at least one, without repeating a picture.

    Every count is as likely as the others, as long as there are pictures with it.

    Raises:
        ValueError: if there are not so many pictures.
    """
    generator = random.Random(seed)
    pictures: dict[int, list[Picture]] = {count: [] for count in range(1, LARGEST_COUNT + 1)}
    for picture in all_pictures():
        pictures[len(picture.cells)].append(picture)
    for group in pictures.values():
        generator.shuffle(group)
    tests = max(1, rows // _TEST_SHARE)
    if not 1 <= rows <= _MOST_ROWS:
        raise ValueError(f"rows={rows} is invalid: no picture repeats. Set it to a number from 1 to {_MOST_ROWS}.")
    drawn = []
    for _ in range(rows + tests):
        group = generator.choice([group for group in pictures.values() if group])
        drawn.append(ImageExercise(group.pop(), generator.choice(list(QUESTIONS))))
    return drawn[:rows], drawn[rows:]


def write_image_task(folder: Path, seed: int, rows: int) -> None:
    """Write train.parquet with `rows` rows and test.parquet, with the columns of verl's geo3k.py.

    Equal arguments give equal files.

    Raises:
        ValueError: if there are not so many pictures.
    """
    files = {}
    for split, exercises in zip(("train", "test"), draw_exercises(seed, rows), strict=True):
        files[folder / f"{split}.parquet"] = [
            to_image_row(each.problem, each.answer, [each.picture.png()], index, split, DATA_SOURCE, INSTRUCTION)
            for index, each in enumerate(exercises)
        ]
    write_files(files, IMAGE_SCHEMA)
