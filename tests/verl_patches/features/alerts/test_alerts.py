"""Alert rules fire once, at their exact step; they never delay a step, and an alert may end the run."""

import json
import math
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from statistics import median
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay import ConfigurationError, SettingsError
from post_training.report.run_error import RunError
from verl_patches.features import settings
from verl_patches.features.alerts import watcher
from verl_patches.features.alerts.feature import ALERTS, AlertsSettings, check_rules, rules_of
from verl_patches.features.alerts.rules import DEFAULTS, Rule, Watched, read_rules
from verl_patches.features.alerts.watcher import Alerts, StoppedByAlert, alerts_of_run
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.configuration_checks.values import resolved
from verl_patches.trainer.main_ppo import compose

KEY = "alerts.rules"
NAN = math.nan


def rules(**given):
    return read_rules(given, False, KEY)


def met(rule, series):
    """Return the steps (counted from 1) at which the rule fires."""
    watched = Watched(*rules(rule={"metric": "m", **rule}))
    return [step for step, value in enumerate(series, start=1) if watched.step(value)]


@pytest.mark.parametrize(
    ("rule", "series", "steps"),
    [
        ({"above": 0.1}, [0.1, 0.2, 0.3], [2]),
        ({"above": 0.1, "for": 3}, [0.2, 0.2, 0.0, 0.2, 0.2, 0.2, 0.2], [6]),
        ({"below": -1}, [-1, -2], [2]),
        ({"above": 0.1, "for": 2}, [0.2, NAN, 0.2, 0.2], [4]),
        ({"nan": True, "for": 2}, [1.0, NAN, math.inf, NAN], [3]),
        ({"rises_by": 2, "for": 2}, [1, 1, 1, 1, 9, 1, 9, 9], [8]),
        ({"rises_by": 2}, [1, 9, 1, 9, 1, 9], [6]),
        ({"stays_within": 0.5, "for": 3}, [0, 1, 1.5, 1, 3, 3], [4]),
        ({"stays_within": 0, "for": 2}, [1, 1], [2]),
    ],
)
def test_a_rule_is_met_at_its_step_and_once(rule, series, steps):
    assert met(rule, series) == steps


def first_by_definition(rule, series):
    """Return the step at which the rule first fires, found by checking every step against the steps before it."""
    limit, count = next(value for name, value in rule.items() if name != "for"), rule.get("for", 1)
    for step in range(1, len(series) + 1):
        last = series[max(0, step - count) : step]
        if len(last) < count:
            continue
        if "stays_within" in rule and max(last) - min(last) <= limit:
            return step
        if "above" in rule and all(value > limit for value in last):
            return step
        before = series[: step - count]
        if "rises_by" in rule and len(before) >= 5 and all(value > limit * median(before) for value in last):
            return step
    return None


@given(
    st.sampled_from(["above", "rises_by", "stays_within"]),
    st.sampled_from([1, 2, 3]),
    st.integers(2, 4),
    st.lists(st.integers(1, 8), max_size=30),
)
def test_a_rule_is_met_where_its_definition_says(condition, limit, count, series):
    rule = {condition: limit, "for": count}
    expected = first_by_definition(rule, series)
    assert met(rule, series) == ([] if expected is None else [expected])


@pytest.mark.parametrize("count", [95, 100, 101, 150, 400])
@pytest.mark.parametrize(
    ("rule", "held"),
    [({"above": 1.6}, 2), ({"below": 0.5}, 0), ({"nan": True}, NAN), ({"stays_within": 0}, 1)],
)
def test_long_rule_is_met_after_all_its_steps(rule, held, count):
    """The condition holds for one step too few, is interrupted for one step, then holds for long enough."""
    calm = [1, 1.5, 1, 1.5, 1, 1.5]
    series = [*calm, *[held] * (count - 1), 1.5, *[held] * (count + 5)]
    assert met({**rule, "for": count}, series) == [len(calm) + count - 1 + 1 + count]
    rise = {"rises_by": 2, "for": count}
    assert met(rise, [*calm, *[9] * (count + 5)]) == [first_by_definition(rise, [*calm, *[9] * count])]


def test_rise_is_reckoned_from_the_latest_hundred_steps():
    assert met({"rises_by": 2, "for": 100}, [4] * 100 + [1] * 100 + [3] * 100) == [300]


def test_a_rule_goes_on_from_a_checkpoint_as_if_it_had_never_ended():
    series = [1, 1, 1, 1, 1, 9, 9, 1, 9, 9, 9]
    rule = {"metric": "m", "rises_by": 2, "for": 3}
    for cut in range(len(series)):
        watched = Watched(*rules(rule=rule))
        found = [step for step, value in enumerate(series[:cut], 1) if watched.step(value)]
        again = Watched(*rules(rule=rule))
        again.restore(json.loads(json.dumps(watched.state())))
        found += [step for step, value in enumerate(series[cut:], cut + 1) if again.step(value)]
        assert found == [11], cut


def test_all_rules_of_a_run_go_on_and_one_that_is_new_begins():
    old, new = {"metric": "m", "above": 1, "for": 2}, {"metric": "n", "above": 1, "for": 2}
    before, met = Alerts(rules(old=old), lambda alert: None), []
    before.take(1, {"m": 5, "n": 5})
    again = Alerts(rules(old=old, new=new), lambda alert: met.append((alert["step"], alert["alert"])))
    again.restore(json.loads(json.dumps(before.state())))
    for step in (2, 3):
        again.take(step, {"m": 5, "n": 5})
    assert met == [(2, "old"), (3, "new")]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"above": 3}, "m is 7, above 3 for 2 steps"),
        ({"below": 3}, "m is 7, below 3 for 2 steps"),
        ({"rises_by": 3}, "m is 7, more than 3 times its median for 2 steps"),
        ({"stays_within": 3}, "m is 7, within 3 for 2 steps"),
        ({"nan": True}, "m is 7, not a finite number for 2 steps"),
    ],
)
def test_each_condition_has_its_words(rule, words):
    (made,) = rules(r={"metric": "m", "for": 2, **rule})
    assert made.sentence(5, 7.0) == f"alert r at step 5: {words}"


def test_a_rule_of_numbers_that_are_not_finite_has_no_limit():
    assert rules(r={"metric": "m", "nan": True}) == [Rule("r", "m", "nan", 0.0, 1, "log")]


def test_own_rules_take_the_place_of_the_defaults():
    assert {rule.name for rule in read_rules({}, True, KEY)} == set(DEFAULTS) and not rules()
    chosen = {
        rule.name: rule
        for rule in read_rules({"kl": {"metric": "actor/kl_loss", "above": 9}, "slow_step": None}, True, KEY)
    }
    assert chosen["kl"].limit == 9 and "slow_step" not in chosen and len(chosen) == len(DEFAULTS) - 1


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (3, "Set it to a group such as"),
        ({"metric": "m"}, "needs a metric"),
        ({"above": 1}, "needs a metric"),
        ({"metric": "m", "above": 1, "below": 0}, "and one of above"),
        ({"metric": "m", "above": "much"}, "='much' is invalid. Set it to a number"),
        ({"metric": "m", "above": math.inf}, "Set it to a number"),
        ({"metric": "m", "above": True}, "above=True is invalid. Set it to a number"),
        ({"metric": "m", "above": 1, "for": 0}, "for=0 is invalid. Set it to a number of steps"),
        ({"metric": "m", "above": 1, "for": True}, "for=True is invalid. Set it to a number of steps"),
        ({"metric": "m", "above": 1, "for": 1.5}, "for=1.5 is invalid. Set it to a number of steps"),
        ({"metric": "m", "stays_within": 1}, "needs at least 2 steps. Set it to 2 or more"),
        ({"metric": "m", "above": 1, "then": "panic"}, "then='panic' is invalid. Set it to one of log"),
        ({"metric": "m", "abvoe": 1}, "unknown key alerts.rules.r.abvoe"),
    ],
)
def test_a_rule_that_means_nothing_is_one_sentence(rule, said):
    with pytest.raises(SettingsError, match=said):
        rules(r=rule)


def test_an_address_to_post_to_is_needed_and_is_checked():
    posts = {"kl": {"metric": "m", "above": 1, "then": "webhook"}}
    with pytest.raises(ConfigurationError, match="needs actor_rollout_ref.overlay.alerts.webhook"):
        check_rules({}, settings.OverlaySettings(alerts=AlertsSettings(True, rules=posts)))
    check_rules({}, settings.OverlaySettings(alerts=AlertsSettings(True, rules=posts, webhook="https://example.org/x")))
    with pytest.raises(ConfigurationError, match="for=0 is invalid"):
        check_rules(
            {}, settings.OverlaySettings(alerts=AlertsSettings(rules={"kl": {"metric": "m", "above": 1, "for": 0}}))
        )


# The monitoring_config of a verl guide, as printed there.
MONITORING = """
monitoring_config = {
    "metrics": ["reward_score", "kl_divergence", "entropy", "gpu_utilization", "memory_usage"],
    "alerting": {"threshold": {"reward_score": 0.8, "kl_divergence": 0.1}},
    "dashboard": "verl-production-monitoring"
}
"""


@cache
def composed(name):
    return resolved(compose(name, ["actor_rollout_ref.model.path=/weights"]))


def monitored(name="rehearsal", **given):
    """Return the checked settings of configuration `name` with the guide's monitoring_config; `given` replaces keys."""
    name_of_key, _, value = MONITORING.partition(" = ")
    return check_configuration({**composed(name), name_of_key.strip(): json.loads(value), **given})


@pytest.mark.parametrize("name", ["rehearsal", "qwen2_5_0_5b_gsm8k"])
def test_thresholds_of_a_guide_are_rules_of_a_run(name):
    chosen = monitored(name)
    assert rules_of(chosen) == [
        Rule("reward_score", "critic/score/mean", "below", 0.8, 1, "log"),
        Rule("kl_divergence", "actor/kl_loss", "above", 0.1, 1, "log"),
    ]
    assert ALERTS.is_on(chosen)
    also = settings.OverlaySettings(alerts=AlertsSettings(enabled=True), monitoring=chosen.monitoring)
    assert {rule.name for rule in rules_of(also)} == {*DEFAULTS, "reward_score", "kl_divergence"}
    own = {"reward_score": {"metric": "critic/score/mean", "below": 0.8, "for": 50}}
    chosen = settings.OverlaySettings(alerts=AlertsSettings(rules=own), monitoring=chosen.monitoring)
    assert [rule.steps for rule in rules_of(chosen)] == [50, 1]
    assert not ALERTS.is_on(monitored(monitoring_config=None))


def test_thresholds_of_a_guide_fire_at_their_step_once_and_absent_metrics_are_named(tmp_path, capsys):
    written = []
    with alerts_of_run(monitored(), written.append, None):
        for step, (score, kl) in enumerate([(0.9, 0.1), (0.7, 0.05), (0.9, 0.3), (0.6, 0.4)], start=1):
            watcher.process_alerts().take(step, {"critic/score/mean": score, "actor/kl_loss": kl, "perf/mfu/actor": 0})
    assert [(entry["step"], entry["alert"]) for entry in written] == [(2, "reward_score"), (3, "kl_divergence")]
    said = capsys.readouterr().err
    assert "note: monitoring_config.metrics: entropy: no step had the metric actor/entropy_loss" in said
    assert "memory_usage: no step had the metric memory/peak_bytes/update" in said and said.count("note") == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"metrics": ["reward"]}, "monitoring_config.metrics.0=reward is invalid: it should be 'reward_score', "),
        ({"alerting": {"threshold": {"reward_score": "high"}}}, "threshold.reward_score=high is invalid"),
        ({"alerting": {"threshold": {"memory_usage": 0.9}}}, "write a rule in actor_rollout_ref.overlay.alerts.rules"),
        ({"alerts": {}}, "unknown key monitoring_config.alerts, .*did you mean monitoring_config.alerting"),
    ],
)
def test_invalid_monitoring_config_rejected(given, says):
    with pytest.raises(ConfigurationError, match=says) as caught:
        monitored(monitoring_config=given)
    assert "\n" not in str(caught.value)


def test_two_rules_on_one_step_are_both_said_and_a_missing_metric_is_named(capsys):
    written = []
    chosen = rules(a={"metric": "x", "above": 1}, b={"metric": "y", "nan": True}, c={"metric": "absent", "above": 0})
    alerts = Alerts(chosen, written.append)
    assert alerts.take(0, {"x": 9}) == "" and not written  # a validation before the first step
    for step, x in enumerate((0, 2, 3), start=1):
        assert alerts.take(step, {"x": x, "y": NAN if step == 2 else 0.0}) == ""
    alerts.finish()
    assert [(entry["step"], entry["alert"]) for entry in written] == [(2, "a"), (2, "b")]
    said = capsys.readouterr().err
    assert "warning: alert a at step 2: x is 2, above 1 for 1 steps" in said and said.count("warning") == 2
    assert "note: alert c: no step had the metric absent" in said


@pytest.fixture
def slow_receiver():
    received, release = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            release.wait(20)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", received, release
        release.set()
        server.shutdown()


def test_a_receiver_that_does_not_answer_holds_no_step_up_and_no_end(slow_receiver):
    address, received, release = slow_receiver
    alerts = Alerts(rules(a={"metric": "x", "above": 1, "then": "webhook"}), lambda alert: None, address)
    known = set(threading.enumerate())
    alerts.take(1, {"x": 2})  # returns before the receiver has answered: it waits for `release`
    assert not release.is_set()
    # At exit Python waits for every thread that is not a daemon.
    assert all(thread.daemon for thread in set(threading.enumerate()) - known)
    until = time.monotonic() + 20
    while not received and time.monotonic() < until:
        time.sleep(0.01)
    release.set()
    alerts.finish()
    assert [(entry["step"], entry["alert"]) for entry in received] == [(1, "a")]


def test_posts_share_one_deadline_at_the_end(monkeypatch):
    """The last step may trigger many rules, and none of their posts is answered."""
    now = [0.0]

    class Unanswered:
        def join(self, limit):
            now[0] += limit

    monkeypatch.setattr(watcher.time, "monotonic", lambda: now[0])
    alerts = Alerts([], lambda alert: None)
    alerts._posts = [Unanswered() for _ in range(30)]
    alerts.finish()
    assert now[0] == watcher._LAST_POST_LIMIT_S


def test_a_receiver_that_is_not_there_is_one_warning_without_its_address(capsys):
    alerts = Alerts(
        rules(a={"metric": "x", "above": 1, "then": "webhook"}), lambda alert: None, "http://127.0.0.1:1/secret"
    )
    alerts.take(1, {"x": 2})
    alerts.finish()
    said = capsys.readouterr().err
    assert "alert a could not be posted (URLError)" in said and "secret" not in said


@pytest.mark.parametrize("saved_already", [False, True])
def test_a_rule_that_ends_the_run_saves_the_step(tmp_path, saved_already):
    if saved_already:
        (tmp_path / "global_step_4").mkdir()
    saved = []
    trainer = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(tmp_path))),
        global_steps=4,
        _save_checkpoint=lambda: saved.append(4),
    )
    given = settings.OverlaySettings(
        alerts=AlertsSettings(True, False, {"kl": {"metric": "x", "above": 1, "then": "save_and_stop"}})
    )
    with (
        mock.patch.object(watcher, "process_publisher") as publisher,
        pytest.raises(RunError, match="alert kl at step 4: x is 2.*the run is saved and ends"),
        alerts_of_run(given, lambda alert: None, trainer),
    ):
        raise StoppedByAlert(watcher.process_alerts().take(4, {"x": 2.0}))
    assert saved == ([] if saved_already else [4])
    assert publisher.return_value.finish.called


def test_a_run_that_fails_otherwise_is_not_saved():
    given = settings.OverlaySettings(alerts=AlertsSettings(True))
    with pytest.raises(ValueError, match="another"), alerts_of_run(given, lambda alert: None, None):
        raise ValueError("another")
