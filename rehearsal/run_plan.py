"""The parts of a rehearsal's plan that both stacks have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class RunPlan(Protocol):
    """The paths and commands that the shared stages use and a dry run prints."""

    @property
    def output(self) -> Path:
        """The folder that the run writes."""

    @property
    def checkpoint(self) -> Path:
        """The folder of the tiny checkpoint."""

    def environment(self) -> Mapping[str, str]:
        """The variables that the commands get."""

    def checkpoint_command(self) -> list[str]:
        """Return the command that makes the checkpoint."""

    def data_command(self) -> list[str]:
        """Return the command that makes the parquet files."""

    def run_command(self) -> list[str]:
        """Return the command that trains."""
