"""The points at which a training is killed, drawn from the processes to kill and from the phases of the run."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from rehearsal.resume_proof.stops import AFTER_RENAME, BEFORE_RENAME, CHUNK, FILE, Stop

Killed = Literal["driver", "worker", "raylet", "SIGTERM"]
KILLED: tuple[Killed, ...] = ("driver", "worker", "raylet", "SIGTERM")
"""SIGKILL of the command, of the process at the point, or of Ray's node process; SIGTERM of the command."""

WORKER_PLACES = ("rollout", "ref", "update", CHUNK, FILE)
DRIVER_PLACES = ("reward", BEFORE_RENAME, AFTER_RENAME)
# A checkpoint that is written in the background has its name when the next step's update begins, and not before these.
_BEFORE_THE_UPDATE = ("rollout", "reward", "ref")
# A rank writes far more chunks than this into its file, whatever the model.
_CHUNKS = 8


@dataclass(frozen=True)
class Point:
    """Kill `killed` when the run is at `stop`."""

    killed: Killed
    stop: Stop

    def __str__(self) -> str:
        who = "the driver's loop" if self.stop.rank < 0 else f"rank {self.stop.rank}"
        which = f" {self.stop.number}" if self.stop.place == CHUNK else ""
        return f"{self.killed} while {who} is at {self.stop.place}{which} of step {self.stop.step}"


def draw_points(number: int, seed: int, dies: int, steps: int, places: tuple[str, ...]) -> list[Point]:
    """Draw `number` points; every victim and every place is drawn once before one is drawn again.

    A point always has a checkpoint before it to resume from, and never lies after the last one.

    Args:
        number: of points.
        seed: of the draw.
        dies: ranks that may be at a place.
        steps: of the run.
        places: phases and places of `stops`.
    """
    generator = random.Random(seed)
    points: list[Point] = []
    victims: list[Killed] = []
    left: list[str] = []
    while len(points) < number:
        victims = victims or generator.sample(KILLED, len(KILLED))
        left = left or generator.sample(places, len(places))
        place = left.pop()
        last = steps - 1 if place == AFTER_RENAME else steps
        rank = -1 if place in DRIVER_PLACES else generator.randrange(dies)
        chunk = generator.randint(1, _CHUNKS) if place == CHUNK else 1
        first = 3 if place in _BEFORE_THE_UPDATE else 2
        points.append(Point(victims.pop(), Stop(place, generator.randint(first, last), rank, chunk)))
    return points
