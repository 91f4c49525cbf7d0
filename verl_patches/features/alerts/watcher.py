"""The alerts of the run that this process drives: they are printed, recorded, posted, and may end the run."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from post_training.process_context import process_context
from post_training.report.run_error import RunError
from verl_patches.features.alerts.feature import rules_of
from verl_patches.features.alerts.monitoring import asked_for
from verl_patches.features.alerts.rules import Rule, Watched
from verl_patches.features.training_checkpoint.kept_states import process_kept_states
from verl_patches.features.training_checkpoint.step_folders import step_folder
from verl_patches.features.training_checkpoint.trainer import process_publisher

_POST_LIMIT_S = 10.0
# Seconds that the end of a run waits for alerts that are still being posted, for all of them together.
_LAST_POST_LIMIT_S = 2.0


class StoppedByAlert(Exception):
    """A rule ends the run after this step; the message is the rule's."""


class Alerts:
    """Checks the metrics of every logged step against the rules.

    Args:
        rules: the rules of the run.
        write: takes an alert as a JSON object.
        webhook: the address for alerts whose rule posts them.
        asked_for: further metrics that some step should have, by the name to use in a message.
    """

    def __init__(
        self,
        rules: list[Rule],
        write: Callable[[dict[str, Any]], None],
        webhook: str = "",
        asked_for: Mapping[str, str] | None = None,
    ) -> None:
        self._watched = {rule.name: Watched(rule) for rule in rules}
        self._write, self._webhook, self._missing = write, webhook, dict(asked_for or {})
        self._posts: list[threading.Thread] = []

    def take(self, step: int, metrics: Mapping[str, Any]) -> str:
        """Take in a step and report the rules that it meets; return why the run must end after it, or else ""."""
        if step < 1:  # a validation before the first one
            return ""
        stops = []
        self._missing = {name: metric for name, metric in self._missing.items() if metric not in metrics}
        for watched in self._watched.values():
            value = _number(metrics.get(watched.rule.metric))
            if value is None or not watched.step(value):
                continue
            sentence = watched.rule.sentence(step, value)
            print(f"warning: {sentence}", file=sys.stderr, flush=True)
            alert = {"step": step, "alert": watched.rule.name, "message": sentence}
            self._write(alert)
            if watched.rule.then == "webhook":
                self._post(alert)
            if watched.rule.then == "save_and_stop":
                stops.append(sentence)
        return "; ".join(stops)

    def finish(self) -> None:
        """Wait briefly for alerts that are being posted, and report metrics that no step had."""
        until = time.monotonic() + _LAST_POST_LIMIT_S
        for post in self._posts:
            post.join(max(0.0, until - time.monotonic()))
        unseen = {f"alert {name}": each.rule.metric for name, each in self._watched.items() if not each.seen}
        for name, metric in (unseen | self._missing).items():
            print(f"note: {name}: no step had the metric {metric}", file=sys.stderr, flush=True)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: watched.state() for name, watched in self._watched.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; rules that it does not contain begin anew."""
        for name, watched in self._watched.items():
            if name in state:
                watched.restore(state[name])

    def _post(self, alert: dict[str, Any]) -> None:
        """Post an alert in a thread of its own, so that no step waits for it."""
        post = threading.Thread(target=_send, args=(self._webhook, alert), daemon=True)
        post.start()
        self._posts = [*(thread for thread in self._posts if thread.is_alive()), post]


def _send(address: str, alert: dict[str, Any]) -> None:
    request = urllib.request.Request(
        address, json.dumps(alert).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        urllib.request.urlopen(request, timeout=_POST_LIMIT_S).close()
    except (OSError, ValueError) as error:  # the address is a secret
        reason = type(error).__name__
        print(f"warning: alert {alert['alert']} could not be posted ({reason})", file=sys.stderr, flush=True)


def _number(value: Any) -> float | None:
    """Return a metric as a number; None if it is absent or not a number."""
    value = value.item() if getattr(value, "shape", None) in ((), (1,)) else value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def begin(alerts: Alerts) -> None:
    """Make these the alerts of this process, and keep their state in its checkpoints."""
    process_context().keep(alerts)
    process_kept_states().register("alerts", alerts.state, alerts.restore)


def process_alerts() -> Alerts:
    """Return the alerts of the run in this process, set by `begin`."""
    alerts = process_context().find(Alerts)
    assert alerts is not None, "no run with alerts has begun"
    return alerts


@contextmanager
def alerts_of_run(settings: Any, write: Callable[[dict[str, Any]], None], trainer: Any) -> Iterator[None]:
    """Check the steps of verl's training loop within this context against the rules of the overlay's settings.

    Raises:
        RunError: a rule ended the run; its last step has a checkpoint then.
    """
    begin(Alerts(rules_of(settings), write, settings.alerts.webhook, asked_for(settings.monitoring)))
    try:
        yield
    except StoppedByAlert as stop:
        process_publisher().finish()
        if not step_folder(Path(trainer.config.trainer.default_local_dir), trainer.global_steps).exists():
            trainer._save_checkpoint()
            process_publisher().logged(trainer.global_steps, {})
        raise RunError(f"{stop}; the run is saved and ends") from stop
    finally:
        process_alerts().finish()
