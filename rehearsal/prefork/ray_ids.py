"""Keeps Ray's generator of random IDs unused before workers are forked, so that each fork seeds one of its own.

Decorating a class as an actor draws from it; importing this module replaces that draw. Ray's core seeds the generator
at the first draw, and forks of a process that has drawn all draw the same IDs: threads of two workers get one ID, their
calls of an actor too, and the actor fails Ray's check `erased == 1`.
"""

import os

import ray.actor
from ray import ActorClassID


class ClassIDs:
    """Stands in for `ActorClassID` in `ray.actor`."""

    @staticmethod
    def from_random() -> ActorClassID:
        """A new ID, from the system's random numbers."""
        return ActorClassID(os.urandom(ActorClassID.size()))


ray.actor.ActorClassID = ClassIDs
