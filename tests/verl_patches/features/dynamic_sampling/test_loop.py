"""The training loop over qualifying prompts: what each step trains on, how the run ends, how it resumes."""

import json
import shutil
from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay import ConfigurationError
from post_training.report.run_error import RunError
from rehearsal.plan import Options, make_plan
from tests.verl_patches.features.dynamic_sampling import scripted
from tests.verl_patches.features.dynamic_sampling.scripted import Killed, Prompts, accuracy_reward, fit, make_trainer
from verl_patches.features.data_order.order import DataOrder
from verl_patches.features.dynamic_sampling.feature import FilterGroups
from verl_patches.features.dynamic_sampling.generation_batch import PromptGroup
from verl_patches.features.dynamic_sampling.queue import PromptQueue
from verl_patches.features.dynamic_sampling.source import RolloutBuffer, Sizes
from verl_patches.features.overlong.feature import OverlongBuffer
from verl_patches.features.step import Step, Workers
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose

FILTER = "algorithm.filter_groups"


def of_steps(records, name):
    return [records[step][name] for step in sorted(records)]


@pytest.mark.parametrize("configuration", ["rehearsal", "qwen2_5_0_5b_gsm8k"], ids=["megatron", "fsdp"])
def test_every_step_trains_on_the_configured_number_of_groups_and_all_of_them_differ(tmp_path, configuration):
    trainer = make_trainer(tmp_path, configuration=configuration)
    records = fit(trainer)
    assert list(records) == [1, 2, 3, 4, 5, 6]
    assert of_steps(records, "sampling/trained_prompts") == [4] * 6
    assert of_steps(records, "sampling/groups_with_gradient") == [1.0] * 6
    generated = of_steps(records, "sampling/generated_prompts")
    assert sum(generated) > 24
    assert sum(map(len, trainer.actor_rollout_wg.asked)) >= sum(generated), "less what only fills a generation batch"
    assert {len(rows) for rows in trainer.actor_rollout_wg.trained} == {4}


def test_without_the_filter_some_groups_teach_nothing(tmp_path):
    """The control: the same workers with the loader that verl makes."""
    records = fit(make_trainer(tmp_path, f"{FILTER}.enable=false"))
    assert of_steps(records, "sampling/generated_prompts") == of_steps(records, "sampling/trained_prompts") == [4] * 6
    assert min(of_steps(records, "sampling/groups_with_gradient")) < 1


def test_the_filter_sees_the_metric_and_not_the_score(tmp_path):
    """All answers to odd rows are right, but long ones score less: by acc alone such a group has no difference."""
    certain = {"chance": lambda row, weight: 1.0 if row % 2 else 0.5}
    by_accuracy = make_trainer(tmp_path, **certain)
    records = fit(by_accuracy)
    assert all(row % 2 == 0 for rows in by_accuracy.actor_rollout_wg.trained for row in rows)
    assert of_steps(records, "sampling/groups_with_gradient") == [1.0] * 6
    by_score = make_trainer(tmp_path, f"{FILTER}.metric=seq_reward", **certain)
    fit(by_score)
    assert any(row % 2 for rows in by_score.actor_rollout_wg.trained for row in rows)


def test_rewards_are_computed_once_and_found_in_any_order(tmp_path):
    """verl reorders the batch to balance its lengths; every answer must keep its own score."""
    calls = []

    def counted(data, return_dict=False):
        calls.append(len(data))
        return accuracy_reward(data, return_dict)

    trainer = make_trainer(tmp_path, "trainer.balance_batch=true", reward=counted)
    seen = []
    update = trainer.actor_rollout_wg.update_actor

    def look(batch):
        expected = accuracy_reward(batch)
        assert torch.equal(batch.batch["token_level_scores"], expected)
        assert [float(a) for a in batch.non_tensor_batch["acc"]] == (batch.batch["responses"][:, 0] == 6).tolist()
        seen.append(batch.non_tensor_batch["index"].tolist())
        return update(batch)

    trainer.actor_rollout_wg.update_actor = look
    records = fit(trainer)
    assert sum(calls) == 4 * sum(of_steps(records, "sampling/generated_prompts"))
    assert any(rows[place] != rows[place - place % 4] for rows in seen for place in range(16)), "some group was parted"


def test_metrics_of_a_step_are_those_of_all_its_waves(tmp_path):
    """The test counts from what the reward function saw. More prompts qualify than are trained on; the others wait."""
    gen_batches = []

    def seen(data, return_dict=False):
        right = (data.batch["responses"][:, 0] == scripted.RIGHT).view(-1, 4)
        gen_batches.append((right.any(-1) & ~right.all(-1), accuracy_reward(data).sum(-1)))
        return accuracy_reward(data, return_dict)

    records, number = fit(make_trainer(tmp_path, reward=seen)), 0
    for record in records.values():
        first, number = number, number + int(record["sampling/gen_batches"])
        differ, scores = (torch.cat(each) for each in zip(*gen_batches[first:number], strict=True))
        assert record["sampling/generated_prompts"] == len(differ)
        assert record["sampling/qualified_share"] == pytest.approx(differ.float().mean().item())
        assert record["sampling/generated_score"] == pytest.approx(scores.mean().item())
    assert number == len(gen_batches)
    trained = sum(of_steps(records, "sampling/trained_prompts"))
    assert sum(int(differ.sum()) for differ, _ in gen_batches) > trained


def test_the_time_of_the_waves_belongs_to_the_step(tmp_path):
    """The clock advances only in generation and rewards."""
    now = [0.0]

    def takes(seconds, call):
        def timed(*given, **named):
            now[0] += seconds
            return call(*given, **named)

        return timed

    trainer = make_trainer(tmp_path, reward=takes(5.0, accuracy_reward))
    workers = trainer.actor_rollout_wg
    workers.generate_sequences = takes(10.0, workers.generate_sequences)
    with mock.patch("verl_patches.features.step.perf_counter", lambda: now[0]):
        records = fit(trainer)
    for step, record in records.items():
        timing, gen_batches = scripted.Records.timing[step], record["sampling/gen_batches"]
        names = ("gen", "reward", "adv", "step")
        assert [timing[f"timing_s/{name}"] for name in names] == [
            10.0 * gen_batches,
            5.0 * gen_batches,
            0.0,
            15.0 * gen_batches,
        ]
    assert max(record["sampling/gen_batches"] for record in records.values()) > 1


def test_the_last_step_validates_and_saves(tmp_path):
    trainer = make_trainer(tmp_path, "trainer.test_freq=100", "trainer.save_freq=100")
    fit(trainer)
    assert trainer.validations == 1 and len(trainer.actor_rollout_wg.trained) == 6
    assert (tmp_path / "checkpoints" / "global_step_6" / "manifest.json").exists()


# Exhaustion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("trainer.total_epochs=1",), "within all epochs, trainer.total_epochs"),
        (
            (f"{FILTER}.max_num_gen_batches=5", "+data.gen_batch_size=4"),
            "within 5 generation batches, .*max_num_gen_batches",
        ),
    ],
)
def test_a_step_that_cannot_be_filled_ends_the_run(tmp_path, overrides, says):
    rarely = {"chance": lambda row, weight: 0.5 if row < 6 else 0.0}
    failing = make_trainer(tmp_path, *overrides, **rarely)
    with pytest.raises(RunError, match=says):
        fit(failing)
    trained = len(failing.actor_rollout_wg.trained)
    assert 1 <= trained < 6 and not (tmp_path / "checkpoints").exists()

    stopping = make_trainer(
        tmp_path, *overrides, f"{FILTER}.on_exhausted=stop_and_save", "trainer.test_freq=100", **rarely
    )
    records = fit(stopping)
    assert len(records) == trained and stopping.validations == 1
    saved = json.loads((tmp_path / "checkpoints" / f"global_step_{trained}" / "trainer.json").read_text())
    assert saved["step"] == trained == saved["data"]["given"]


def test_what_was_not_trained_in_the_end_is_in_the_checkpoint(tmp_path):
    """The saved queue equals that of a run which stops at that step; with more epochs the stopped run continues."""
    rarely = {"chance": lambda row, weight: 0.5 if row < 6 else 0.0}
    stopping = (f"{FILTER}.on_exhausted=stop_and_save", "trainer.resume_mode=auto", "trainer.total_epochs=1")
    folder, other = fresh(tmp_path, "stopped"), fresh(tmp_path, "unbroken")
    (step,) = fit(make_trainer(folder, *stopping, **rarely))
    fit(make_trainer(other, "trainer.save_freq=1", f"trainer.total_training_steps={step}", **rarely))
    assert place_of(folder, step) == place_of(other, step)
    assert list(fit(make_trainer(folder, *stopping[:2], **rarely))) == list(range(step + 1, 7))


def place_of(folder, step):
    return json.loads((folder / "checkpoints" / f"global_step_{step}" / "trainer.json").read_text())["data"]


def test_nothing_to_keep_is_a_failure(tmp_path):
    never = make_trainer(
        tmp_path, f"{FILTER}.on_exhausted=stop_and_save", "trainer.total_epochs=1", chance=lambda row, weight: 1.0
    )
    with pytest.raises(RunError, match="of 23 generated prompts, 0 qualified by .*=acc, fewer than the 4 of a"):
        fit(never)


def test_a_metric_that_the_reward_does_not_give_is_named_at_the_first_wave(tmp_path):
    trainer = make_trainer(tmp_path, f"{FILTER}.metric=accuracy")
    with pytest.raises(
        RunError, match="algorithm.filter_groups.metric=accuracy is invalid: the reward function returns acc, seq_r"
    ):
        fit(trainer)
    assert len(trainer.actor_rollout_wg.asked) == 1


def test_a_metric_that_is_no_number_rejected(tmp_path):
    def reward(data, return_dict=False):
        return {"reward_tensor": torch.zeros(len(data), 4), "reward_extra_info": {"acc": ["seven"] * len(data)}}

    with pytest.raises(RunError, match="acc, set in .*metric, is not a number .*'seven'"):
        fit(make_trainer(tmp_path, reward=reward))


# A kill and a resume ------------------------------------------------------------------------------------------------


def fresh(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    trainer = make_trainer(folder, *SAVING)
    return fit(trainer), trainer.actor_rollout_wg, folder


FILE = "rank-00000-of-00001.safetensors"
SAVING = ("trainer.save_freq=2", "trainer.resume_mode=auto", "+data.gen_batch_size=8")


def gen_batches_before(workers, records, step):
    """Return the number of generation batches of all steps before `step`."""
    return int(sum(records[number]["sampling/gen_batches"] for number in range(1, step)))


def test_a_checkpoint_that_is_written_while_the_next_wave_generates_is_of_the_end_of_its_step(tmp_path, unbroken):
    """Killed in step 5 while step 4 is still being written, the run resumes from step 2."""
    expected, workers, folder = unbroken
    killed = make_trainer(tmp_path, *SAVING, in_background=True)
    killed.actor_rollout_wg.killed_at = gen_batches_before(workers, expected, 5) + 2
    with pytest.raises(Killed):
        fit(killed)
    root = tmp_path / "checkpoints"
    assert {each.name for each in root.iterdir() if each.is_dir()} == {"global_step_2", "global_step_4.partial"}
    resumed = make_trainer(tmp_path, *SAVING, in_background=True)
    found = fit(resumed)
    assert found == {step: expected[step] for step in (3, 4, 5, 6)}
    for step in (2, 4, 6):
        assert place_of(tmp_path, step) == place_of(folder, step)
        content = [(each / "checkpoints" / f"global_step_{step}" / "actor" / FILE).read_text()
                   for each in (tmp_path, folder)]  # fmt: skip
        assert content[0] == content[1]


@pytest.mark.parametrize(("step", "gen_batch", "gen_batches"), [(3, 2, 3), (5, 2, 2)])
def test_a_run_killed_in_a_gen_batch_goes_on_bit_for_bit(tmp_path, unbroken, step, gen_batch, gen_batches):
    """Killed in the second of three generation batches; and with a checkpoint that holds returned prompts."""
    expected, workers, folder = unbroken
    assert expected[step]["sampling/gen_batches"] == gen_batches
    killed = make_trainer(tmp_path, *SAVING)
    killed.actor_rollout_wg.killed_at = gen_batches_before(workers, expected, step) + gen_batch
    with pytest.raises(Killed):
        fit(killed)
    resumed = make_trainer(tmp_path, *SAVING)
    found = fit(resumed)
    begun = step - 1
    assert bool(place_of(folder, begun)["queue"]["returned"]) == (step == 5)
    assert found == {number: record for number, record in expected.items() if number > begun}
    assert resumed.actor_rollout_wg.trained == workers.trained[begun:]
    assert resumed.actor_rollout_wg.weight == workers.weight
    assert place_of(tmp_path, 6) == place_of(folder, 6)


@pytest.mark.parametrize("lost", ["returned", "acceptance", "position"])
def test_a_resume_without_part_of_the_queue_differs(tmp_path, unbroken, lost):
    """The control: each part of the state is needed."""
    expected, _, folder = unbroken
    differs = []
    for step in (2, 4):
        copied = tmp_path / f"{lost}{step}"
        shutil.copytree(folder, copied)
        for later in range(step + 2, 7, 2):
            shutil.rmtree(copied / "checkpoints" / f"global_step_{later}")
        trainer = make_trainer(copied, *SAVING)
        load = trainer.train_dataloader.load_state_dict

        def incomplete(state, load=load):
            queue = state["queue"] | ({} if lost == "acceptance" else {lost: [] if lost == "returned" else 0})
            counts = {"last": [0, 0], "now": [0, 0]} if lost == "acceptance" else state["acceptance"]
            load(state | {"queue": queue, "acceptance": counts})

        trainer.train_dataloader.load_state_dict = incomplete
        found = fit(trainer)
        differs.append(found != {number: record for number, record in expected.items() if number > step})
    assert any(differs)


# The rollout buffer against a naive reference ------------------------------------------------------------------------


class Scripted(RolloutBuffer):
    """A rollout buffer whose groups have no tensors: `verdict(prompt, attempt)` says whether one qualifies."""

    verdict = attempts = handed_out = None

    def _generated(self, prompts, step, workers):
        self.handed_out.update(prompts)
        return [PromptGroup(prompt, {"prompt": prompt}, None, torch.zeros(1), {}) for prompt in prompts]

    def _batch_of(self, epoch, groups):
        return groups

    def _qualifies(self, group):
        self.attempts[group.prompt] += 1
        return self.verdict(group.prompt, self.attempts[group.prompt])


def scripted_source(rows, epochs, batch, largest, multiple, verdict):
    queue = PromptQueue(DataOrder(rows, batch, 3), epochs)
    made = Scripted(
        None, list, queue, FilterGroups("acc", on_exhausted="stop_and_save"), Sizes(batch, largest, 1, 10**9)
    )
    made.workers = Workers(None, multiple, None)
    made.verdict, made.attempts, made.handed_out = verdict, Counter(), Counter()
    return made


def steps_of(source):
    """Return the prompts of each step until there are no more."""
    steps = []
    while (groups := source.collect(Step(len(steps) + 1), source.workers)) is not None:
        steps.append([group.prompt for group in groups])
    return steps


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.integers(1, 3))


@settings(max_examples=100)
@given(SIZES, st.randoms(use_true_random=False))
def test_the_steps_are_the_qualified_prompts_in_their_order_cut_into_batches(sizes, random):
    """Naive reference: go through all prompts, keep those that qualify, cut. The size of generation batches is free."""
    rows, epochs, batch, largest, multiple = sizes
    good = {(epoch, row): random.random() < 0.6 for epoch in range(epochs) for row in range(rows)}
    found = steps_of(scripted_source(rows, epochs, batch, largest, multiple, lambda p, _: good[p]))
    order = DataOrder(rows, batch, 3)
    kept = [(e, row) for e in range(epochs) for row in order.permutation(e) if good[e, row]]
    assert found == [kept[start : start + batch] for start in range(0, len(kept) - batch + 1, batch)]


@settings(max_examples=100)
@given(SIZES, st.randoms(use_true_random=False))
def test_no_prompt_is_lost_and_none_is_trained_twice_in_an_epoch(sizes, random):
    """A returned prompt may fail the second time; trained, rejected and remaining prompts add up to all, each once."""
    rows, epochs, batch, largest, multiple = sizes
    rejected = Counter()

    def verdict(prompt, attempt):
        qualified = random.random() < 0.6
        rejected[prompt] = not qualified
        return qualified

    source = scripted_source(rows, epochs, batch, largest, multiple, verdict)
    before, trained = source.state_dict(), Counter()
    for prompts in steps_of(source):
        assert len(prompts) == batch
        trained.update(prompts)
        before = source.state_dict()
    left = PromptQueue(DataOrder(rows, batch, 3), epochs)
    left.load_state_dict(before["queue"])
    remaining = Counter(left.take(10**6))
    everything = {(epoch, row) for epoch in range(epochs) for row in range(rows)}
    assert max((trained + remaining).values(), default=1) == 1
    gone = everything - set(trained) - set(remaining)
    assert all(rejected[prompt] for prompt in gone)


def test_discarded_surplus_detected(monkeypatch):
    monkeypatch.setattr(PromptQueue, "give_back", lambda self, prompts: None)
    with pytest.raises(AssertionError):
        test_the_steps_are_the_qualified_prompts_in_their_order_cut_into_batches()


# Configuration ------------------------------------------------------------------------------------------------------

ON = (f"{FILTER}.enable=true",)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((f"{FILTER}.metric=null",), f"{FILTER}.metric=null is invalid. Set it to"),
        ((f"{FILTER}.lower_bound=0.8", f"{FILTER}.upper_bound=0.2"), "lower_bound=0.8 is above .*upper_bound=0.2"),
        (("reward_model.launch_reward_fn_async=true",), "launch_reward_fn_async=True computes them after"),
        (("trainer.total_training_steps=null",), "needs trainer.total_training_steps, .* trainer.total_epochs=1000"),
        (("+data.gen_batch_size=42",), "data.gen_batch_size=42 .* does not divide among 4 dies"),
        (
            ("actor_rollout_ref.actor.ppo_mini_batch_size=16",),
            "recompute_old_log_prob=False is exact only with one update .* splits the 32 prompts .* into 2 updates",
        ),
        ((f"{FILTER}.on_exhausted=train_smaller",), "on_exhausted=train_smaller"),
        ((f"{FILTER}.lower_bound=.nan",), "lower_bound"),
    ],
)
def test_invalid_filter_settings_rejected(overrides, says):
    with pytest.raises(ConfigurationError, match=says):
        check_configuration(compose("rehearsal", [*ON, *overrides]))


def test_bounds_waves_and_larger_waves_than_batches_are_accepted():
    more = (f"{FILTER}.lower_bound=0.1", f"{FILTER}.upper_bound=0.9", f"{FILTER}.max_num_gen_batches=10")
    config = compose("rehearsal", [*ON, *more, "+data.gen_batch_size=96"])
    check_configuration(config)
    assert FilterGroups.of(config) == FilterGroups("seq_reward", 10, 0.1, 0.9, "fail")


@pytest.mark.parametrize(
    "bounds", [("lower_bound=0.5", "upper_bound=0.5"), ("lower_bound=0.5",), ("upper_bound=0.5",), ("lower_bound=0",)]
)
def test_one_bound_or_two_alike_are_accepted(bounds):
    check_configuration(compose("rehearsal", [*ON, *(f"{FILTER}.{bound}" for bound in bounds)]))


def test_the_recipe_switches_dapo_on_in_a_rehearsal():
    (recipe,) = [each for each in make_plan(Options(recipe="dapo"), "time").overrides if each.startswith("+recipe=")]
    config = compose("rehearsal", [recipe])
    check_configuration(config)
    assert FilterGroups.of(config) == FilterGroups("acc", 10)
    assert OverlongBuffer.of(config) == OverlongBuffer(2, 10, 1.0, False)
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert not actor.use_kl_loss and actor.loss_agg_mode == "token-mean"
    assert not [each for each in make_plan(Options(), "time").overrides if each.startswith("+recipe=")]


def test_the_prompts_of_the_script_are_as_verl_reads_them():
    assert set(Prompts(3)[0]) >= {"input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "data_source"}
