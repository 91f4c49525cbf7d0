"""verl's own loop over prompts whose answers may continue in later steps: what it trains on, and how it resumes."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from overlay import ConfigurationError, SettingsError
from post_training.plan.partial_rollout import may_end
from tests.verl_patches.features.dynamic_sampling import scripted
from tests.verl_patches.features.dynamic_sampling.scripted import END, PADDING, RIGHT, Killed, fit
from verl_patches.features import settings
from verl_patches.features.data_order.order import DataOrderError
from verl_patches.features.partial_rollout.columns import FINISHED, TOKENS, take_rows
from verl_patches.features.partial_rollout.feature import PARTIAL_ROLLOUT
from verl_patches.features.sample_handles.handles import ID, DriverOfHandles
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

SECTION = "actor_rollout_ref.overlay.partial_rollout"
CORRECTION = "actor_rollout_ref.overlay.rollout_correction.enabled"
NEEDED = ("actor_rollout_ref.actor.recompute_old_log_prob=true", f"{CORRECTION}=true")
WITHOUT = (*NEEDED, "algorithm.filter_groups.enable=false")
ON = (*WITHOUT, f"{SECTION}.enabled=true")
N, LONGEST = 3, 12


class GoingOn(scripted.ScriptedWorkers):
    """Workers that extend answers token by token; a token depends on the prompt, answer, position and weight."""

    def generate_sequences(self, prompts: Any) -> Any:
        from verl import DataProto

        begun = take_rows(prompts)
        ids = prompts.batch["input_ids"]
        assert len(ids) % self.world_size == 0
        self.asked.append([int(row) for row in ids[:, 1] - 10])
        if len(self.asked) == self.killed_at:
            raise Killed
        answers = self._answers(begun)
        rows = len(ids) * self._n
        responses, log_probs = torch.full((rows, LONGEST), PADDING), torch.full((rows, LONGEST), -1.0)
        for row, (tokens, values, _) in enumerate(answers):
            responses[row, : len(tokens)], log_probs[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(values)
        ids, mask, places = (
            prompts.batch[name].repeat_interleave(self._n, 0)
            for name in ("input_ids", "attention_mask", "position_ids")
        )
        columns = {
            "prompts": ids,
            "responses": responses,
            "input_ids": torch.cat([ids, responses], -1),
            "attention_mask": torch.cat([mask, (responses != PADDING).long()], -1),
            "position_ids": torch.cat([places, torch.arange(1, LONGEST + 1)[None] + places[:, -1:]], -1),
            "rollout_log_probs": log_probs,
        }
        if begun is not None:
            columns[TOKENS] = torch.tensor([len(tokens) for tokens, _, _ in answers])
            columns[FINISHED] = torch.tensor([int(finished) for _, _, finished in answers])
        return DataProto.from_dict(columns)

    def _answers(self, begun: Any) -> list[tuple[list[int], list[float], bool]]:
        rows = self.asked[-1]
        if begun is None:
            has: list[Any] = [([], [], False) for _ in range(len(rows) * self._n)]
            due, needed = [False] * len(rows), len(rows)
        else:
            has = [(list(a.tokens), list(a.log_probs), a.finished) for row in begun[0] for a in row.answers]
            due, needed = [row.due for row in begun[0]], begun[1].groups
        while True:
            left = [any(not each[2] for each in has[at * self._n : (at + 1) * self._n]) for at in range(len(rows))]
            if may_end((not each for each in left), needed, any(a and b for a, b in zip(left, due, strict=True))):
                return has
            has = [self._grown(rows[at // self._n], at % self._n, *each) for at, each in enumerate(has)]

    def _grown(self, row: int, place: int, tokens: list[int], values: list[float], finished: bool) -> Any:
        if finished:
            return tokens, values, finished
        draw = random.Random(f"{row} {place} {len(tokens)} {self.weight:.6f}")
        ends = tokens and draw.random() < 0.1 + 0.1 * (row % 4)
        token = END if ends else draw.choice([RIGHT, scripted.WRONG, 7])
        tokens, values = [*tokens, token], [*values, self._log_prob(draw)]
        return tokens, values, token == END or len(tokens) == LONGEST

    def _log_prob(self, draw: random.Random) -> float:
        return -draw.random() * 0.2


@pytest.fixture
def make(monkeypatch):
    """Return a function that makes a trainer with the given overrides and activates its settings."""

    def made(folder: Path, *overrides: str, **options: Any) -> Any:
        config = scripted._job("rehearsal", folder, folder / "train.parquet", N, overrides)
        chosen = OverlaySettings.from_config(config.actor_rollout_ref, config)
        monkeypatch.setattr(settings, "_current", chosen)
        monkeypatch.setattr(scripted, "RESPONSE", LONGEST)
        return scripted.make_trainer(folder, *overrides, n=N, **{"workers": GoingOn, **options})

    return made


def trained(trainer: Any) -> list[list[int]]:
    return trainer.actor_rollout_wg.trained


def test_with_a_threshold_of_1_every_metric_is_that_without(make, tmp_path):
    """The run crosses the end of an epoch, whose last prompts do not fill a batch."""
    without = make(tmp_path, *WITHOUT)
    expected = fit(without)
    whole = make(tmp_path, *ON, f"{SECTION}.threshold=1.0")
    found = fit(whole)
    assert trained(whole) == trained(without) and whole.actor_rollout_wg.asked == without.actor_rollout_wg.asked
    assert whole.actor_rollout_wg.weight == without.actor_rollout_wg.weight != 0
    assert list(found) == [1, 2, 3, 4, 5, 6]
    for step, record in found.items():
        own = {name for name in record if name.startswith("partial_rollout/")}
        assert {name: value for name, value in record.items() if name not in own} == expected[step]
        assert record["partial_rollout/old_share"] == record["partial_rollout/waiting_prompts"] == 0


class Keeping(GoingOn):
    """Workers that keep the answers of the last generation, as they do when the driver sends sample references."""

    trained_on = 0

    def generate_sequences(self, prompts: Any) -> Any:
        self.driver = getattr(self, "driver", None) or DriverOfHandles(lambda order: order, lambda: 1)
        answers = self.driver.generating(super().generate_sequences)(prompts)
        if ID in answers.batch.keys():
            self.kept = dict(zip(answers.batch[ID].tolist(), answers.batch["responses"].tolist(), strict=True))
        return answers

    def update_actor(self, batch: Any) -> Any:
        for each, response in zip(batch.batch[ID].tolist(), batch.batch["responses"].tolist(), strict=True):
            assert self.kept[each] == response
        self.trained_on += len(batch)
        return super().update_actor(batch)


def test_workers_have_all_that_a_step_trains_on_among_what_they_generated_last(make, tmp_path):
    """Sample references therefore need to live for one step only: answers that waited come back whole."""
    trainer = make(tmp_path, *ON, f"{SECTION}.threshold=0.5", workers=Keeping)
    records = fit(trainer)
    assert trainer.actor_rollout_wg.trained_on == len(records) * len(trained(trainer)[0]) * N
    assert any(record["partial_rollout/old_share"] > 0 for record in records.values())


def test_every_step_trains_on_whole_groups_and_no_prompt_twice(make, tmp_path):
    trainer = make(
        tmp_path, *ON, f"{SECTION}.threshold=0.5", "trainer.total_epochs=2", "trainer.total_training_steps=10"
    )
    update, seen = trainer.actor_rollout_wg.update_actor, []

    def look(batch):
        assert not {TOKENS, FINISHED} & set(batch.batch.keys())
        responses = batch.batch["responses"]
        ended = (responses == END).any(-1) | (responses[:, -1] != PADDING)
        seen.append((len(batch), bool(ended.all())))
        return update(batch)

    trainer.actor_rollout_wg.update_actor = look
    records = fit(trainer)
    assert seen == [(4 * N, True)] * 10
    counts = Counter(row for rows in trained(trainer) for row in rows)
    assert sum(counts.values()) == 40 and max(counts.values()) == 2, "once an epoch, of which there are two"
    assert any(record["partial_rollout/old_share"] > 0 for record in records.values())
    assert max(record["partial_rollout/max_age"] for record in records.values()) in (1, 2)
    assert records[10]["partial_rollout/waiting_prompts"] == 0


class AmongThree(GoingOn):
    """Three engines: a step's four prompts do not divide among them, so empty rows fill the last batch."""

    world_size = 3


def test_rows_that_fill_a_wave_up_end_no_rollout(make, tmp_path):
    """They count as finished from the start, and a step still waits for all of its own groups."""
    trainer = make(tmp_path, *ON, f"{SECTION}.threshold=0.5", workers=AmongThree)
    records = fit(trainer)
    asked = [len(rows) for rows in trainer.actor_rollout_wg.asked]
    assert asked[0] == 9 and asked[-1] == 6, "the last step has 4 prompts and 2 rows of nothing"
    assert [len(rows) for rows in trained(trainer)] == [len(trained(trainer)[0])] * len(records)
    assert records[6]["partial_rollout/waiting_prompts"] == 0


def test_tokens_keep_the_log_probs_with_which_they_were_sampled(make, tmp_path, monkeypatch):
    """Each log-prob encodes the call in which its token was sampled; the step's metrics must report the same."""
    monkeypatch.setattr(GoingOn, "_log_prob", lambda self, draw: -float(len(self.asked)))
    trainer = make(tmp_path, *ON, f"{SECTION}.threshold=0.5")
    update, old, seen = trainer.actor_rollout_wg.update_actor, [], []

    def look(batch):
        mask = batch.batch["responses"] != PADDING
        sampled = -batch.batch["rollout_log_probs"][mask]
        age = trainer.global_steps - sampled
        is_old = age > 0
        mean = age[is_old].mean().item() if is_old.any() else 0
        old.append((is_old.float().mean().item(), mean, age.max().item()))
        assert sampled.min() >= 1
        seen.extend(sampled.tolist())
        return update(batch)

    trainer.actor_rollout_wg.update_actor = look
    records = fit(trainer)
    names = [f"partial_rollout/{name}" for name in ("old_share", "mean_age", "max_age")]
    assert old == [pytest.approx(tuple(record[name] for name in names)) for record in records.values()]
    assert len(set(seen)) > 2


def test_an_answer_that_comes_back_without_its_tokens_is_an_error(make, tmp_path, monkeypatch):
    """A control: the workers start the answers again."""
    monkeypatch.setattr(GoingOn, "_answers", _forgetful(GoingOn._answers))
    with pytest.raises(ValueError, match="came back without the [0-9]+ tokens from before"):
        fit(make(tmp_path, *ON, f"{SECTION}.threshold=0.5"))


def _forgetful(answers):
    def forgetting(self, begun):
        return [
            ([10 + len(self.asked)] * len(tokens), values, finished)
            for tokens, values, finished in answers(self, begun)
        ]

    return forgetting


# A kill and a resume ------------------------------------------------------------------------------------------------

SAVING = (*ON, f"{SECTION}.threshold=0.5", "trainer.save_freq=2", "trainer.resume_mode=auto")


def state_of(folder: Path, step: int) -> Any:
    return json.loads((folder / "checkpoints" / f"global_step_{step}" / "trainer.json").read_text())["data"]


def test_a_run_that_is_killed_goes_on_bit_for_bit_with_what_was_in_flight(make, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    unbroken = make(whole, *SAVING)
    expected = fit(unbroken)
    killed = make(broken, *SAVING)
    killed.actor_rollout_wg.killed_at = 4
    with pytest.raises(Killed):
        fit(killed)
    in_flight = state_of(broken, 2)["in_flight"]
    assert any(answer["segments"] and not answer["finished"] for group in in_flight for answer in group["answers"])
    resumed = make(broken, *SAVING)
    assert fit(resumed) == {step: record for step, record in expected.items() if step > 2}
    assert trained(resumed) == trained(unbroken)[2:]
    assert state_of(broken, 6) == state_of(whole, 6)


@pytest.mark.parametrize("lost", ["tokens", "groups", "begun"])
def test_a_resume_without_part_of_what_was_in_flight_differs(make, tmp_path, lost):
    """The control: each part of the state is needed."""
    expected = fit(make(tmp_path, *SAVING))
    for later in (4, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"global_step_{later}")
    trainer = make(tmp_path, *SAVING, f"{SECTION}.max_steps=1")
    load = trainer.train_dataloader.load_state_dict

    def incomplete(state):
        groups = state["in_flight"] if lost != "groups" else []
        empty = {"tokens": "", "log_probs": "", "segments": [], "finished": False}
        for group in groups:
            group["answers"] = [empty] * N if lost == "tokens" else group["answers"]
            group["begun"] = 2 if lost == "begun" else group["begun"]
        load(state | {"in_flight": groups})

    trainer.train_dataloader.load_state_dict = incomplete
    assert fit(trainer) != {step: record for step, record in expected.items() if step > 2}


def test_a_checkpoint_of_another_run_rejected(make, tmp_path):
    source = make(tmp_path, *ON).train_dataloader
    state = json.loads(json.dumps(source.state_dict()))
    with pytest.raises(DataOrderError, match="has no answers in flight"):
        source.load_state_dict({"epoch": 0, "position": 4})
    source.load_state_dict(state)
    answer = {"tokens": "", "log_probs": "", "segments": [], "finished": False}
    with pytest.raises(DataOrderError, match="have 1 answers each, but this run has actor_rollout_ref.rollout.n=3"):
        source.load_state_dict(state | {"in_flight": [{"prompt": [0, 1], "begun": 1, "answers": [answer]}]})
    with pytest.raises(DataOrderError, match="an answer has 0 tokens, 0 log-probs and 2 tokens"):
        spoilt = answer | {"segments": [[1, 2]]}
        source.load_state_dict(state | {"in_flight": [{"prompt": [0, 1], "begun": 1, "answers": [spoilt] * 3}]})


# Configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((f"{SECTION}.threshold=0.4",), "threshold=0.4 is invalid: between 0.5 and 1"),
        ((f"{SECTION}.threshold=1.5",), "threshold=1.5 is invalid: between 0.5 and 1"),
        ((f"{SECTION}.max_steps=0",), "max_steps"),
        ((f"{CORRECTION}=false",), "rollout_correction.enabled=False treats"),
        (
            ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"),
            "filter_groups.enable=true, which",
        ),
        (("actor_rollout_ref.overlay.dp_sync.enabled=false",), "needs actor_rollout_ref.overlay.dp_sync.enabled=true"),
        (("algorithm.adv_estimator=remax",), "remax"),
    ],
)
def test_settings_incompatible_with_partial_rollout_rejected(overrides, says):
    with pytest.raises((ConfigurationError, SettingsError), match=says) as rejected:
        check_configuration(compose("rehearsal", [*ON, *overrides]))
    assert "\n" not in str(rejected.value)


def test_skipping_old_log_prob_rejected():
    off = [
        "actor_rollout_ref.actor.recompute_old_log_prob=false",
        f"{CORRECTION}=false",
    ]
    with pytest.raises(ConfigurationError, match="recompute_old_log_prob=False does not compute their old log-probs"):
        check_configuration(compose("rehearsal", [*ON, *off]))


def test_it_is_off_unless_it_is_asked_for():
    assert not PARTIAL_ROLLOUT.settings().enabled
    check_configuration(compose("rehearsal", [*ON]))
