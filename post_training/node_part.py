"""A description of what a launcher would start on this node: one line of JSON, printed by its `--describe`.

python -m post_training.node_part ROLE [NAME=VALUE...] -- COMMAND...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from post_training.start_status import Role

_CAPACITY = "NPU_EMULATOR_CAPACITY_MB"


@dataclass(frozen=True)
class NodePart:
    """One node's part of a job.

    Args:
        role: the head runs the training; a worker gives its dies to it.
        command: the words of the training's command, the same on every node.
        environment: the variables that the launcher exports before it.
    """

    role: Role
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def emulated_mb(self) -> int | None:
        """The memory of an emulated die; None on NPUs."""
        given = self.environment.get(_CAPACITY)
        return int(given) if given else None

    @classmethod
    def parse(cls, text: str) -> NodePart:
        """Read what `--describe` printed: its last line.

        Raises:
            ValueError: it is not the description of a node's part.
        """
        found: Any = json.loads((text.strip().splitlines() or [""])[-1])
        try:
            return cls(found["role"], tuple(found["command"]), found["environment"])
        except (KeyError, TypeError) as error:
            raise ValueError("the launcher does not describe a part of a job") from error


def main(words: Sequence[str]) -> None:
    """Print the part that the words describe."""
    separator = words.index("--")
    environment = dict(word.split("=", 1) for word in words[1:separator])
    part = NodePart(words[0], tuple(words[separator + 1 :]), environment)  # type: ignore[arg-type]  # a shell's word
    print(json.dumps(asdict(part)))


if __name__ == "__main__":
    main(sys.argv[1:])
