"""The feature alerts: its configuration and its switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overlay import ConfigurationError, Feature, Key, SettingsError
from verl_patches.features.alerts import monitoring
from verl_patches.features.alerts.rules import Rule, read_rules

KEY = "actor_rollout_ref.overlay.alerts"


@dataclass(frozen=True)
class AlertsSettings:
    """Rules over the metrics of a run, and the action at the step at which one is met.

    defaults: also apply the rules for skipped updates, KL, entropy, a flat reward, log-probs, truncation and slow
    steps. rules: by name, {metric, one of above, below, rises_by, stays_within, nan, for: steps, then: log, webhook or
    save_and_stop}. webhook: an address for POST, from the environment: ${oc.env:NAME}.
    """

    enabled: bool = False
    defaults: bool = True
    rules: Mapping = field(default_factory=dict)
    webhook: str = ""


def rules_of(settings: Any) -> list[Rule]:
    """Return the rules of a run: its own, the thresholds of monitoring_config, and the defaults if alerts are enabled.

    Raises:
        SettingsError: a rule is invalid; the message is one sentence.
    """
    alerts = settings.alerts
    given = {**monitoring.threshold_rules(settings.monitoring), **alerts.rules}
    return read_rules(given, alerts.enabled and alerts.defaults, f"{KEY}.rules")


def check_rules(config: Mapping[str, Any], settings: Any) -> None:
    """Check that every rule is valid, and that there is a webhook address if a rule posts."""
    alerts = settings.alerts
    try:
        rules = rules_of(settings)
    except SettingsError as error:
        raise ConfigurationError(str(error)) from error
    posted = next((rule.name for rule in rules if rule.then == "webhook"), None)
    if posted and not alerts.webhook.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{KEY}.rules.{posted}.then=webhook needs {KEY}.webhook, an address that begins with http:// or https://. "
            "Set it from the environment, as ${oc.env:NAME}"
        )


ALERTS = Feature(
    name="alerts",
    purpose="Each anomaly of a metric is reported once, as soon as it is confirmed.",
    section=KEY,
    settings=AlertsSettings,
    keys=(Key("monitoring", monitoring.KEY, Mapping, None),),
    is_on=lambda settings: settings.alerts.enabled or settings.monitoring is not None,
    checks=(check_rules,),
)
