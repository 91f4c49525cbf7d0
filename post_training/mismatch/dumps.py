"""Dumps of one side's activations: a safetensors file with a row for every point and token.

`__metadata__["header"]` is JSON: `format` ("activations 1"), `side` (rollout or training), `dtype`, `architecture`,
`layers`, `temperature`, `replicas` (points at which ranks differ that should have the same rows, with the largest
relative difference) and `about`, free text.

Tensors: `tokens` int64 [tokens], all sequences one after another; `lengths` int64 [sequences, 2], tokens of the prompt
and of the whole sequence; for each point of `points.py`, under its name, values [rows, width], and under `NAME.rows`
the tokens of these rows, int64 [rows], ascending indices into `tokens`. A row of `logits` and `log_probs` predicts the
token after its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from post_training.mismatch.points import EXPERTS, split

Side = Literal["rollout", "training"]
SIDES: tuple[Side, ...] = ("rollout", "training")
FORMAT = "activations 1"
ROWS = ".rows"
_COLUMN = "@"


class DumpError(ValueError):
    """A file is no dump, or captured rows do not form one; the message is one sentence."""


@dataclass(frozen=True)
class TokenSequence:
    """Token ids of a prompt and of the response to it."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.response


@dataclass(frozen=True)
class Header:
    """The fields of a dump's header; see the module's docstring."""

    side: Side
    dtype: str
    architecture: str
    layers: int
    temperature: float
    replicas: Mapping[str, float] = field(default_factory=dict)
    about: str = ""


@dataclass(frozen=True)
class Captured:
    """Captured values of a point.

    Attributes:
        rows: int64 [rows], indices of tokens; ascending in a dump.
        values: [rows, width].
    """

    rows: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Dump:
    """One side of a comparison."""

    header: Header
    sequences: tuple[TokenSequence, ...]
    points: Mapping[str, Captured]


Part = Mapping[tuple[str, int], Captured]
"""One rank's recording, by point and first column; rows are in any order, and repeated if they were computed again."""


def merged(parts: Iterable[Part]) -> tuple[dict[str, Captured], dict[str, float]]:
    """Merge the ranks' parts into whole points.

    If several ranks have the same row, the first rank's counts. Columns of a point that is sharded over ranks are put
    side by side.

    Returns:
        The points, and by point the largest relative difference of rows that several ranks have, if they differ.

    Raises:
        DumpError: ranks with different columns of a point have different rows.
    """
    columns: dict[str, dict[int, list[Captured]]] = {}
    for part in parts:
        for (point, first), captured in part.items():
            columns.setdefault(point, {}).setdefault(first, []).append(captured)
    points: dict[str, Captured] = {}
    replicas: dict[str, float] = {}
    for point, found in columns.items():
        pieces = []
        for first in sorted(found):
            piece, differs = _one_of_each(found[first])
            pieces.append(piece)
            if differs:
                replicas[point] = max(differs, replicas.get(point, 0.0))
        if any(not torch.equal(piece.rows, pieces[0].rows) for piece in pieces):
            raise DumpError(f"{point}: ranks that own its columns computed different tokens")
        points[point] = Captured(pieces[0].rows, torch.cat([piece.values for piece in pieces], dim=1))
    return points, replicas


def _one_of_each(captured: Sequence[Captured]) -> tuple[Captured, float]:
    """Return each row once, ascending, and the largest relative difference of a row to its first copy.

    A stable sort keeps copies of a row in order, so the first of each group is the first copy: rows [5, 3, 5] are
    sorted to places [1, 0, 2], where 3 begins at 0 and 5 at 1, so the first copies are at places 1 and 0.
    """
    rows = torch.cat([each.rows for each in captured])
    values = torch.cat([each.values for each in captured])
    ordered, places = rows.sort(stable=True)
    kept, group, counts = ordered.unique_consecutive(return_inverse=True, return_counts=True)
    firsts = places[counts.cumsum(0) - counts]
    chosen = values[firsts]
    if len(kept) == len(rows):
        return Captured(kept, chosen), 0.0
    ours, first = values[places].double(), chosen[group].double()
    scale = first.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    return Captured(kept, chosen), float(((ours - first).norm(dim=1) / scale).max())


def write_dump(path: Path, dump: Dump) -> None:
    """Write the file under a temporary name and rename it."""
    tokens = torch.tensor([token for each in dump.sequences for token in each.tokens])
    lengths = torch.tensor([(len(each.prompt), len(each.tokens)) for each in dump.sequences])
    tensors = {"tokens": tokens, "lengths": lengths}
    for point, captured in dump.points.items():
        tensors |= _named(point, captured)
    _write(path, tensors, {"format": FORMAT} | asdict(dump.header))


def write_part(path: Path, part: Part) -> None:
    """Write one rank's recording, for `read_part`."""
    tensors: dict[str, torch.Tensor] = {}
    for (point, first), captured in part.items():
        tensors |= _named(f"{point}{_COLUMN}{first}", captured)
    _write(path, tensors, {})


def _named(name: str, captured: Captured) -> dict[str, torch.Tensor]:
    # safetensors rejects tensors that share memory, and points may share their rows.
    return {name: captured.values.contiguous(), name + ROWS: captured.rows.clone()}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(dict(tensors), partial, {"header": json.dumps(header)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_part(path: Path) -> Part:
    """Read the file that `write_part` wrote."""
    _, tensors = _read(path)
    part = {}
    for name in tensors:
        if not name.endswith(ROWS):
            point, _, first = name.rpartition(_COLUMN)
            part[point, int(first)] = Captured(tensors[name + ROWS], tensors[name])
    return part


def read_dump(path: Path) -> Dump:
    """Read a dump from any machine.

    Raises:
        DumpError: there is no such file, or it is no complete dump of this format.
    """
    said, tensors = _read(path)
    try:
        if said.pop("format") != FORMAT:
            raise DumpError(f"{path} has another format than {FORMAT!r}. Write it with this version")
        header = Header(**said)
        if header.side not in SIDES:
            raise DumpError(f"{path} names the side {header.side!r}, but a dump is of rollout or training")
        return Dump(header, _sequences(tensors), _points(path, tensors))
    except (KeyError, TypeError, RuntimeError) as error:
        raise DumpError(f"{path} is not a dump of activations, or is incomplete ({error!r}). Write it again") from error


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})["header"])
            return said, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise DumpError(f"{path} is not a dump of activations, or was cut off. Write it again") from error


def _sequences(tensors: Mapping[str, torch.Tensor]) -> tuple[TokenSequence, ...]:
    lengths = tensors["lengths"].tolist()
    parts = tensors["tokens"].split([whole for _, whole in lengths])
    return tuple(
        TokenSequence(tuple(part[:prompt].tolist()), tuple(part[prompt:].tolist()))
        for part, (prompt, _) in zip(parts, lengths, strict=True)
    )


def _points(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Captured]:
    points = {}
    for name in tensors.keys() - {"tokens", "lengths"}:
        if name.endswith(ROWS):
            continue
        try:
            split(name)
        except ValueError as error:
            raise DumpError(f"{path}: {error}") from error
        points[name] = captured = Captured(tensors[name + ROWS], tensors[name])
        rows, values = captured.rows, captured.values
        in_order = len(rows) == len(values) and bool((rows.diff() > 0).all())
        if (
            values.dim() != 2
            or not in_order
            or (len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < len(tensors["tokens"]))
        ):
            raise DumpError(f"{path}: the rows of {name} do not match its tokens. Write it again")
        if not name.endswith(EXPERTS) and not values.is_floating_point():
            raise DumpError(f"{path}: {name} is {values.dtype}, not activations. Write it again")
    return points
