"""The penalty for long answers, the exclusion of cut ones from the loss, and the two policy clips."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from overlay import ConfigurationError
from post_training.end_tokens import EndTokens
from verl_patches.features.measure.batch_metrics import truncated
from verl_patches.features.measure.feature import MEASURE
from verl_patches.features.overlong.feature import OVERLONG_FILTERING, OverlongBuffer
from verl_patches.features.overlong.filtering import filtering, without_truncated
from verl_patches.features.overlong.penalty import penalties, with_penalty
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose
from verl_patches.trainer.ppo.middleware import MIDDLEWARE, dress

PENALTY = "reward_model.overlong_buffer"
END = 9


def upstreams(length, buffer):
    """Return the penalty of verl's recipe, which has no lower clamp because no answer exceeds the maximum length."""
    return min(-(length - (buffer.longest - buffer.length)) / buffer.length * buffer.factor, 0)


@pytest.mark.parametrize(("factor", "length"), [(1.0, 4), (0.5, 1), (2.0, 20)])
def test_the_penalty_is_linear_over_the_last_tokens(factor, length):
    buffer = OverlongBuffer(length, 20, factor, False)
    found = penalties(torch.arange(26), buffer)
    assert found[:21].tolist() == pytest.approx([upstreams(each, buffer) for each in range(21)])
    assert found[0] == found[20 - length] == 0 and found[20] == -factor
    assert (found[20:] == -factor).all(), "clamped beyond"
    assert found[20 - length + 1] == pytest.approx(-factor / length)


def batch_of(lengths, width=4, last=END, **columns):
    """Return a `DataProto` of answers of these lengths to prompts of two tokens; each answer's last token is `last`."""
    from verl import DataProto

    responses = torch.full((len(lengths), width), 5)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    responses[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(last)
    attention = torch.cat([torch.ones(len(lengths), 2, dtype=torch.long), mask], -1)
    return DataProto.from_dict({"responses": responses * mask, "attention_mask": attention, **columns})


def test_it_is_taken_from_the_last_token_and_leaves_the_rewards_metrics_alone():
    def reward_fn(data, return_dict=False):
        rewards = torch.zeros(3, 4)
        rewards[torch.arange(3), torch.tensor([0, 2, 3])] = 1.0
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1, 1, 1]}} if return_dict else rewards

    batch = batch_of([1, 3, 4])
    found = with_penalty(reward_fn, OverlongBuffer(2, 4, 1.0, True))(batch, return_dict=True)
    assert found["reward_tensor"].tolist() == [[1, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0]]
    assert found["reward_extra_info"] == {"acc": [1, 1, 1], "overlong_reward": [0.0, -0.5, -1.0]}
    silent = with_penalty(reward_fn, OverlongBuffer(2, 4, 1.0, False))
    assert torch.equal(silent(batch), found["reward_tensor"])
    assert silent(batch, return_dict=True)["reward_extra_info"] == {"acc": [1, 1, 1]}


def test_scores_that_the_batch_holds_stay_as_they_are():
    """verl's manager returns the batch's own column if it already has scores; a second call must not add a penalty."""
    from verl.workers.reward_manager import NaiveRewardManager

    scores = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    batch = batch_of([1, 3, 4], rm_scores=scores.clone())
    reward_fn = with_penalty(NaiveRewardManager(None, 0), OverlongBuffer(2, 4, 1.0, False))
    for _ in range(2):
        assert reward_fn(batch).tolist() == [[1, 0, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, 0]]
        assert torch.equal(batch.batch["rm_scores"], scores)


def test_an_answer_was_cut_if_it_fills_its_place_and_does_not_end():
    batch = batch_of([2, 4, 4, 4], last=[END, END, 7, 8])
    mask = batch.batch["attention_mask"][:, -4:]
    assert truncated(batch.batch["responses"], mask, {END}).tolist() == [False, False, True, True]
    assert truncated(batch.batch["responses"], mask, {END, 8}).tolist() == [False, False, True, False]


def policy_loss(batch, log_probs, mode="token-mean"):
    """Return verl's loss of one batch, masked by the attention mask as in verl's actors."""
    from verl.trainer.ppo.core_algos import compute_policy_loss

    columns = batch.batch
    mask = columns["attention_mask"][:, -4:]
    old, advantages = columns["old_log_probs"], columns["advantages"]
    return compute_policy_loss(old, log_probs, advantages, mask, 0.2, 0.2, 0.28, 3.0, mode)[0]


def test_cut_answers_are_in_neither_numerator_nor_denominator():
    random = torch.Generator().manual_seed(0)
    lengths, last = [2, 4, 3, 4], [END, 7, END, END]
    columns = {
        name: torch.randn(4, 4, generator=random, dtype=torch.double) for name in ("old_log_probs", "advantages")
    }
    batch = batch_of(lengths, last=last, **columns, response_mask=torch.ones(4, 4, dtype=torch.long))
    filtered = without_truncated(batch, frozenset([END]))
    log_probs = (columns["old_log_probs"] + 0.1).requires_grad_()
    others = batch.select_idxs([0, 2, 3])
    expected = policy_loss(others, log_probs[[0, 2, 3]])
    found = policy_loss(filtered, log_probs)
    assert torch.allclose(found, expected, rtol=1e-9)
    (gradient,) = torch.autograd.grad(found, log_probs)
    assert (gradient[1] == 0).all() and (gradient[[0, 2, 3]] != 0).any()
    assert batch.batch["attention_mask"][1].all(), "the driver's metrics see every token"
    assert filtered.batch["responses"] is batch.batch["responses"], "what stays is not copied"
    assert filtered.batch["response_mask"].tolist() == filtered.batch["attention_mask"][:, -4:].tolist()
    # The control: zero advantages in the row, but its tokens in the denominator.
    batch.batch["advantages"][1] = 0
    assert not torch.allclose(policy_loss(batch, log_probs), expected, rtol=1e-2)


def test_the_update_gets_the_filtered_batch():
    batch = batch_of([4, 1], last=[7, END], old_log_probs=torch.full((2, 4), torch.nan))
    batch.meta_info["training_step"] = 3
    update = filtering(lambda data: data, [END])
    given = update(batch)
    assert given.batch["attention_mask"][:, -4:].sum(-1).tolist() == [0, 1]
    assert given.meta_info == {"training_step": 3}
    assert (given.batch["old_log_probs"][0] == 0).all() and given.batch["old_log_probs"][1].isnan().all()


def test_the_share_of_cut_answers_is_that_of_the_batch_and_not_of_what_is_left():
    """This depends on the order of the middleware list; in the reverse order the share would be 0."""
    both = [each for each in MIDDLEWARE if each.feature in (MEASURE, OVERLONG_FILTERING)]
    assert len(both) == 2
    assert share_of_cut_answers(both) == 0.5 and share_of_cut_answers(both[::-1]) == 0.0


def share_of_cut_answers(middleware) -> float:
    """Return the share that the driver reports when one of two answers is cut and the update gets it without tokens."""
    batch = batch_of([4, 1], last=[7, END], token_level_scores=torch.zeros(2, 4))
    batch.non_tensor_batch["uid"] = np.array(["a", "a"], dtype=object)
    trained = []

    def update(data):
        trained.append(data.batch["attention_mask"][:, -4:].sum(-1).tolist())
        return SimpleNamespace(meta_info={"metrics": {}})

    trainer = trainer_of(SimpleNamespace(update_actor=update))
    dress(trainer, middleware)
    output = trainer.actor_rollout_wg.update_actor(batch)
    assert trained == [[0, 1]]
    return output.meta_info["metrics"]["sampling/truncated_share"]


def trainer_of(actor, **more):
    """Return the part of a trainer that the two features read."""
    given = {"reward_fn": None, "val_reward_fn": None, "log": None, "use_reference_policy": False, "use_critic": False}
    given |= {"end_tokens": lambda: EndTokens((("tokenizer", (END,)),)), "source": SimpleNamespace(metrics={})}
    return SimpleNamespace(config=compose("rehearsal", []), actor_rollout_wg=actor, **given | more)


def test_a_critic_learns_from_the_answers_that_the_actor_learns_from():
    batch, actor, critic = batch_of([4, 1], last=[7, END]), SimpleNamespace(), SimpleNamespace()
    actor.update_actor = critic.update_critic = lambda data: data
    trainer = trainer_of(actor, critic_wg=critic, use_critic=True)
    dress(trainer, [each for each in MIDDLEWARE if each.feature is OVERLONG_FILTERING])
    given = [update(batch).batch["attention_mask"] for update in (actor.update_actor, critic.update_critic)]
    assert torch.equal(*given) and given[0][:, -4:].sum(-1).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("ratio", "advantage", "high", "carries"),
    [(1.25, 1.0, 0.28, True), (1.25, 1.0, 0.2, False), (0.75, -1.0, 0.28, False), (0.75, 1.0, 0.28, True)],
)
def test_clip_higher_lets_a_likelier_token_become_likelier_still(ratio, advantage, high, carries):
    """D5: a ratio of 1.25 has a gradient with clip_ratio_high=0.28 but not with 0.2; the lower clip is unchanged."""
    from verl.trainer.ppo.core_algos import compute_policy_loss

    log_prob = torch.tensor([[ratio]]).log().requires_grad_()
    loss, *_ = compute_policy_loss(
        torch.zeros(1, 1), log_prob, torch.tensor([[advantage]]), torch.ones(1, 1), 0.2, 0.2, high
    )
    loss.backward()
    assert (log_prob.grad.item() != 0) == carries


@pytest.mark.parametrize(("ratio", "carries"), [(2.9, True), (3.1, False), (9.9, False)])
def test_dual_clip_ends_the_gradient_of_a_bad_token_that_became_much_likelier(ratio, carries):
    from verl.trainer.ppo.core_algos import compute_policy_loss

    log_prob = torch.tensor([[ratio]]).log().requires_grad_()
    one = torch.ones(1, 1)
    loss, *_, share = compute_policy_loss(torch.zeros(1, 1), log_prob, -one, one, 0.2, 0.2, 0.28, 3.0)
    loss.backward()
    assert (log_prob.grad.item() != 0) == carries and share == (not carries)
    assert loss.item() == pytest.approx(min(ratio, 3.0))


ON = (f"{PENALTY}.enable=true", f"{PENALTY}.len=4")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((*ON, f"{PENALTY}.len=0"), "len=0 is invalid: an answer has 10 tokens .* Set it to 1 to 10"),
        ((*ON, f"{PENALTY}.len=11"), "len=11 is invalid: an answer has 10 tokens"),
        ((*ON, "reward_model.launch_reward_fn_async=true"), "launch_reward_fn_async=True computes them elsewhere"),
        (
            ("reward_model.reward_manager=dapo",),
            "Set it to naive, to which reward_model.overlong_buffer.enable=True adds",
        ),
        ((*ON, f"{PENALTY}.penalty_factor=-1"), "penalty_factor"),
        (
            ("algorithm.overlong_filtering=true", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"),
            "loss_agg_mode=seq-mean-token-mean takes the mean. Set it to token-mean",
        ),
        (
            (
                "algorithm.overlong_filtering=true",
                "+recipe=ppo",
                "critic.loss_agg_mode=seq-mean-token-mean",
            ),
            "of which critic.loss_agg_mode=seq-mean-token-mean takes the mean",
        ),
    ],
)
def test_invalid_values_rejected(overrides, says):
    with pytest.raises(ConfigurationError, match=says):
        check_configuration(compose("rehearsal", overrides))


def test_the_keys_are_read():
    config = compose("rehearsal", [*ON, "algorithm.overlong_filtering=true"])
    chosen = check_configuration(config)
    assert chosen.overlong_penalty and chosen.overlong_filtering
    assert OverlongBuffer.of(config) == OverlongBuffer(4, 10, 1.0, False)
    off = check_configuration(compose("rehearsal", ["reward_model.overlong_buffer=null"]))
    assert not off.overlong_penalty and not off.overlong_filtering
