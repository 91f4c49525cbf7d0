"""How a batch passes a stand-in for Megatron's schedule: cut anew on the way in, in the old order on the way out."""

import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import verl_patches.prelude_patch  # noqa: F401
from overlay import ConfigurationError
from verl_patches.features.dynamic_batches import micro_batches
from verl_patches.features.dynamic_batches.feature import TokenLimits
from verl_patches.features.dynamic_batches.micro_batches import (
    Agreement,
    agreement_of_ranks,
    limited,
    samples_of_micro_batches,
    with_dynamic_batches,
)
from verl_patches.features.dynamic_batches.packing import first_fit
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose
from verl_patches.workers.actor.megatron_actor import forward_backward_whole_batch

LENGTHS = [3, 9, 1, 4, 2, 7, 5, 1]
UPDATE = "actor_rollout_ref.actor.use_dynamic_bsz=true"


def whole_batch():
    """Return a batch in which every id of row i is i."""
    mask = torch.arange(10) < torch.tensor(LENGTHS)[:, None]
    rows = torch.arange(len(LENGTHS))[:, None].expand(-1, 10)
    return TensorDict({"attention_mask": mask, "input_ids": rows}, [len(LENGTHS)]).to("npu")


class MegatronSchedule:
    """Records the micro batches; a forward-only pass returns one output for each, in verl's two forms."""

    def __init__(self, entropy=True):
        self.lengths, self._entropy = [], entropy

    def __call__(self, *, data_iterator, num_microbatches, forward_only):
        outputs = []
        for batch in data_iterator:
            self.lengths.append(batch["attention_mask"].sum(-1).tolist())
            log_probs = {"log_probs": batch["input_ids"].float() / 10}
            outputs.append([log_probs, batch["input_ids"].float() * 2] if self._entropy else log_probs)
        assert len(self.lengths) == num_microbatches
        return outputs


def run(group, tokens, forward_only=True, alignment=1, **options):
    upstream = MegatronSchedule(**options)
    schedule = with_dynamic_batches(upstream, Agreement(group, alignment))
    batch = whole_batch()
    with limited(tokens):
        outputs = schedule(data_iterator=iter(batch.split(2)), num_microbatches=4, forward_only=forward_only)
    return upstream.lengths, outputs


def test_a_forward_only_pass_hands_back_the_order_of_the_batch(lone_rank):
    lengths, ((log_probs, entropy),) = run(lone_rank, 10)
    assert lengths != [[3, 9], [1, 4], [2, 7], [5, 1]] and sorted(sum(lengths, [])) == sorted(LENGTHS)
    assert all(sum(each) <= 10 for each in lengths)
    rows = torch.arange(len(LENGTHS), device="npu").float()
    assert torch.equal(log_probs["log_probs"][:, 0], rows / 10) and torch.equal(entropy[:, 0], rows * 2)
    _, (plain,) = run(lone_rank, 10, entropy=False)
    assert torch.equal(plain["log_probs"], log_probs["log_probs"])


def test_unrestored_order_detected(lone_rank, monkeypatch):
    monkeypatch.setattr(
        micro_batches, "_in_order", lambda outputs, places: micro_batches._joined(outputs, torch.arange(8))
    )
    _, ((log_probs, _),) = run(lone_rank, 10)
    assert not torch.equal(log_probs["log_probs"][:, 0], torch.arange(8, device="npu") / 10)


def test_an_update_hands_back_what_each_micro_batch_reported(lone_rank):
    lengths, outputs = run(lone_rank, 10, forward_only=False)
    assert len(outputs) == len(lengths) == 4


def test_a_longer_sequence_is_alone_and_tokens_of_alignment_count(lone_rank):
    lengths, _ = run(lone_rank, 8)
    assert [9] in lengths and all(sum(each) <= 8 for each in lengths if each != [9])
    aligned, _ = run(lone_rank, 8, alignment=4)
    assert all(sum(-(-length // 4) * 4 for length in each) <= 8 for each in aligned if len(each) > 1)


def test_two_padded_sequences_beyond_the_limit_part(lone_rank):
    """5 and 5 make 10 of 12 tokens, but 16 once tensor-parallel ranks pad them to multiples of 4."""
    mask = (torch.arange(8) < 5).expand(2, -1).npu()
    assert samples_of_micro_batches(mask, 12, Agreement(lone_rank, alignment=4)) == [[0], [1]]
    assert samples_of_micro_batches(mask, 12, Agreement(lone_rank)) == [[0, 1]]


@settings(max_examples=200)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 60), st.sampled_from([1, 2, 4, 8, 16]))
def test_micro_batches_pack_padded_lengths(lone_rank, lengths, limit, alignment):
    """The limit applies to the sum of the padded lengths in Megatron's forward."""
    padded = [math.ceil(length / alignment) * alignment for length in lengths]
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    found = samples_of_micro_batches(mask.npu(), limit, Agreement(lone_rank, alignment))
    assert sorted(sum(found, [])) == list(range(len(lengths)))
    assert all(sum(padded[row] for row in each) <= limit for each in found if len(each) > 1)
    assert len(found) == len(first_fit(padded, limit))


@pytest.mark.parametrize(
    ("tp", "cp", "lengths", "limit", "cut"),
    [
        # Two ranks share a sequence's tokens: each has 4 tokens of each sequence of 8.
        (1, 2, [8, 8], 8, 1),
        (1, 2, [8, 8], 7, 2),
        (1, 1, [8, 8], 8, 2),
        # 5 tokens are padded to 8 for TP 2 and CP 2; a rank has 4 of them.
        (2, 2, [5, 5, 5], 8, 2),
        (2, 2, [5, 5, 5], 12, 1),
        (4, 2, [5, 16, 9], 16, 2),
        (4, 1, [5, 16, 9], 16, 3),
    ],
)
def test_the_limit_is_of_the_tokens_that_verl_gives_a_rank(lone_rank, tp, cp, lengths, limit, cut):
    """verl's own packing gives the tokens that a rank of TP x CP computes; the key limits tokens of a rank."""
    from megatron.core import mpu
    from verl.models.mcore.util import preprocess_packed_seqs

    mask = torch.arange(16) < torch.tensor(lengths)[:, None]
    batch = TensorDict({"attention_mask": mask, "input_ids": torch.ones(mask.shape, dtype=torch.long)}, [len(lengths)])
    computed = []

    def upstream(*, data_iterator, num_microbatches, forward_only):
        for each in data_iterator:
            packed, _ = preprocess_packed_seqs(each["input_ids"], each["attention_mask"])
            computed.append((len(each), packed.size(1)))
        return []

    sizes = {
        "get_tensor_model_parallel_world_size": lambda: tp,
        "get_context_parallel_world_size": lambda: cp,
        "get_context_parallel_rank": lambda: 0,
        "get_data_parallel_group": lambda: lone_rank,
    }
    with mock.patch.multiple(mpu, **sizes), limited(limit):
        schedule = with_dynamic_batches(upstream, agreement_of_ranks())
        schedule(data_iterator=iter(batch.to("npu").split(1)), num_microbatches=len(lengths), forward_only=False)
    assert sum(rows for rows, _ in computed) == len(lengths) and len(computed) == cut
    assert all(tokens <= limit for rows, tokens in computed if rows > 1)


def test_without_a_limit_nothing_is_touched(lone_rank):
    upstream, iterator = MegatronSchedule(), iter(whole_batch().split(4))
    with_dynamic_batches(upstream, Agreement(lone_rank))(data_iterator=iterator, num_microbatches=2, forward_only=False)
    assert upstream.lengths == [LENGTHS[:4], LENGTHS[4:]]


def test_each_pass_has_verls_keys():
    keys = [UPDATE, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=96"]
    keys += [
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
    ]
    keys += ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=128"]
    config = compose("rehearsal", keys)
    assert TokenLimits.of(OverlaySettings.from_config(config.actor_rollout_ref)) == TokenLimits(96, None, 128)
    check_configuration(config)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (
            "actor_rollout_ref.overlay.exact_loss.enabled=false",
            "exact_loss.enabled=False weights equally. Set it to True",
        ),
        (
            "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2",
            "virtual_pipeline_model_parallel_size=2 is not supported with dynamic batches. Set it to null, or",
        ),
    ],
)
def test_conflicting_settings_rejected(other, says):
    with pytest.raises(ConfigurationError, match=says):
        check_configuration(compose("rehearsal", [UPDATE, other]))


@pytest.mark.parametrize(
    ("trains", "forward_only", "tokens"), [(True, False, 96), (True, True, 64), (False, True, 128)]
)
@pytest.mark.parametrize("left_out", ["", "update", "old_log_prob", "ref"])
def test_each_pass_is_cut_by_its_own_limit(monkeypatch, trains, forward_only, tokens, left_out):
    """The worker of the reference policy has no optimizer, which tells its forward from the actor's."""
    limits = {"update": 96, "old_log_prob": 64, "ref": 128} | ({left_out: None} if left_out else {})
    monkeypatch.setattr(TokenLimits, "of", lambda settings: TokenLimits(**limits))
    found = []

    def upstream(actor, data, *, forward_only):
        found.append((micro_batches._limits[-1:], data.meta_info.get("micro_batch_size")))
        return {}

    actor = SimpleNamespace(actor_optimizer=object() if trains else None)
    data = SimpleNamespace(batch=whole_batch(), meta_info={})
    forward_backward_whole_batch(upstream, actor, data, forward_only=forward_only)
    expected = [each for each in limits.values() if each == tokens]
    assert found == [(expected, len(LENGTHS) if expected else None)] and not micro_batches._limits


def test_passes_of_which_nothing_is_said_follow_the_update():
    chosen = OverlaySettings.from_config({"actor": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 96}})
    assert TokenLimits.of(chosen) == TokenLimits(96, 96, 96)
    assert TokenLimits.of(OverlaySettings()) == TokenLimits()
