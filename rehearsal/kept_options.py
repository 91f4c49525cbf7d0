"""A rehearsal's choices in a file of its run's folder, from which the run is resumed."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from post_training.masking import MASK, masked_text
from post_training.user_files import read_object

# File in a run's folder with the choices of the command that began it.
OPTIONS_NAME = "rehearsal.json"


class MaskedOverride(Exception):
    """A run cannot be resumed without an override that held a secret; the message is one sentence."""


class KeptOptions:
    """A frozen dataclass of choices with `data`, `output`, `overrides` and `resumes` among its fields."""

    overrides: tuple[str, ...]

    def given(self, key: str) -> str | None:
        """Return the last value of an override, without quotes; None if there is none or it is null."""
        words = [override.lstrip("+").partition("=") for override in self.overrides]
        values = [value.strip("'\"") for name, _, value in words if name == key]
        return values[-1] if values and values[-1] != "null" else None

    @property
    def given_model(self) -> Path | None:
        """The folder of the user's own model, which replaces the tiny one; None without one."""
        given = self.given("actor_rollout_ref.model.path")
        return None if given is None else Path(given)

    def write(self, path: Path) -> None:
        """Write the choices as JSON, from which the run can be resumed; secrets in overrides are masked."""
        values = asdict(self)  # type: ignore[call-overload]  # a dataclass, in each subclass
        kept = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        kept["overrides"] = [masked_text(override) for override in self.overrides]
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(kept, indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def of_run(cls, output: Path, more: tuple[str, ...]) -> Self:
        """Read the choices of the run in ``output`` to resume it; ``more`` overrides win against its own.

        Raises:
            OSError, ValueError, TypeError: there is no such run, or its choices cannot be read.
            MaskedOverride: an override held a secret, which the run has not kept.
        """
        kept = read_object(output / OPTIONS_NAME)
        kept |= {"data": kept["data"] and Path(kept["data"]), "output": output, "resumes": True}
        known = {override.partition("=")[0].lstrip("+~") for override in more}
        lost = [each for each in kept["overrides"] if MASK in each and each.partition("=")[0].lstrip("+~") not in known]
        if lost:
            key = lost[0].partition("=")[0]
            raise MaskedOverride(
                f"{lost[0]} is invalid: the run does not keep secrets. Set it again after --, as -- {key}=VALUE"
            )
        return cls(**kept | {"overrides": (*(each for each in kept["overrides"] if MASK not in each), *more)})

    @classmethod
    def of_command(cls, parser: ArgumentParser, values: Mapping[str, Any], resumed: Path) -> Self:
        """Read the choices of `--resume resumed` on a command line with these values; an error ends the process."""
        others = [name for name, value in values.items() if name != "overrides" and value != parser.get_default(name)]
        if others:
            option = next(action.option_strings[0] for action in parser._actions if action.dest == others[0])
            parser.error(f"--resume keeps the options of the run; remove {option}")
        try:
            return cls.of_run(resumed, tuple(values["overrides"]))
        except MaskedOverride as error:
            parser.error(f"--resume {resumed}: {error}")
        except (OSError, ValueError, TypeError, KeyError):
            parser.error(f"--resume {resumed} is not the folder of a rehearsal, which has a {OPTIONS_NAME}")
