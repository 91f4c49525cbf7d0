"""The job that a launcher describes for this node, and the layouts on fewer nodes that the plan allows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from post_training.arguments import absolute
from post_training.node_part import NodePart
from post_training.plan.fewer_nodes import Layout, Layouts
from post_training.processes.logs import last_words

ROOT = Path(__file__).resolve().parents[2]
_MODEL, _CLUSTER, _JOIN, _NAME = "actor_rollout_ref.model.path", "--cluster", "--join", "--config-name"


@dataclass(frozen=True)
class LaunchedJob:
    """A job on several nodes.

    Attributes:
        words: of the training's command.
        cluster: the cluster's file that the launcher was given, if any.
        emulated_mb: memory of an emulated die; None on NPUs.
    """

    words: tuple[str, ...]
    cluster: str | None
    emulated_mb: int | None

    @property
    def model(self) -> Path:
        """The model's config.json."""
        given = [word.partition("=")[2] for word in self.words if word.lstrip("+").startswith(f"{_MODEL}=")]
        return Path(given[-1].strip("'\"")) / "config.json"

    def plan_command(self, overrides: Sequence[str], least: int, die_memory: str | None) -> list[str]:
        """Return the command that prints the layouts on fewer nodes as JSON."""
        name = self.words[self.words.index(_NAME) + 1]
        command = [sys.executable, str(ROOT / "scripts" / "plan.py"), _NAME, name, "--model", str(self.model)]
        command += ["--fewer-nodes", "--min-nodes", str(least), "--json"]
        command += [_CLUSTER, self.cluster] if self.cluster else []
        if self.emulated_mb is None:
            command += ["--die-memory", die_memory] if die_memory else []
            command += ["--host-memory", f"{_host_kib()}KiB"]
        else:
            command += ["--die-memory", f"{self.emulated_mb}MiB", "--emulated"]
        given = self.words[self.words.index(_NAME) + 2 :]
        return [*command, *given, *overrides]


def describe_launched(command: Sequence[str]) -> LaunchedJob | None:
    """Return the job of a launcher's command; None on a node that gives its dies to another node's training.

    Raises:
        ValueError: it is no launcher for several nodes, or rejects its arguments; one sentence.
    """
    if not any(word.endswith(".sh") for word in command):
        raise ValueError("--elastic is invalid: the command is not a launcher of several nodes. Pass one after --")
    if _JOIN in command:
        raise ValueError(
            "--join is invalid with --elastic: the nodes of another's Ray have no supervisors. Remove one of them"
        )
    ended = subprocess.run(
        with_options(command, ["--describe"]), capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    try:
        part = NodePart.parse(ended.stdout)
    except ValueError as error:
        said = (ended.stderr.strip().splitlines() or [f"it does not describe this node's part ({error})"])[-1]
        raise ValueError(f"--elastic is invalid: the launcher says: {said.removeprefix('error: ')}") from error
    if part.role == "worker":
        return None
    # The plan starts in the checkout.
    cluster = str(absolute(command[command.index(_CLUSTER) + 1])) if _CLUSTER in command else None
    return LaunchedJob(part.command, cluster, part.emulated_mb)


def with_options(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a launcher's command with further options of its own, placed before ``--``."""
    place = command.index("--") if "--" in command else len(command)
    return [*command[:place], *options, *command[place:]]


def plan_layouts(job: LaunchedJob, overrides: Sequence[str], least: int, die_memory: str | None) -> Layouts:
    """Return the layouts on fewer nodes.

    The plan runs in a process of its own: a supervisor runs for weeks and must load neither verl nor torch.

    Raises:
        ValueError: the configuration is rejected, or cannot continue on fewer nodes; one sentence.
    """
    command = job.plan_command(overrides, least, die_memory)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if ended.returncode not in (0, 1):
        said = last_words(ended.stderr) or f"it ended with exit status {ended.returncode}"
        raise ValueError(said.removeprefix("error: ").removeprefix("plan.py: error: "))
    try:
        found = json.loads(ended.stdout)
    except ValueError as error:
        said = last_words(ended.stderr) or "it does not print JSON"
        raise ValueError(f"the plan of fewer nodes failed: {said}") from error
    fitting = tuple(Layout(each["nodes"], each["text"], tuple(each["overrides"])) for each in found["fitting"])
    short = {int(nodes): reason for nodes, reason in found["short"].items()}
    return Layouts(found["configured"], found["least"], fitting, short)


def _host_kib() -> int:
    """Return the memory of this node in KiB; all nodes of a job are alike."""
    (line,) = [each for each in Path("/proc/meminfo").read_text().splitlines() if each.startswith("MemTotal:")]
    return int(line.split()[1])
