"""Exact loss changes the losses, the metrics and the schedule as specified; Megatron's schedules are stand-ins."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from overlay import ConfigurationError
from verl_patches.features.exact_loss.gradient_factors import OF_ACTOR, OF_CRITIC, UpdateFactors
from verl_patches.features.exact_loss.update_loss import with_exact_loss
from verl_patches.features.settings import OverlaySettings
from verl_patches.trainer.configuration_checks import check_configuration
from verl_patches.trainer.main_ppo import compose


def micro_batch(*lengths):
    """Make responses of at most four tokens, after prompts of two."""
    mask = torch.arange(6, device="npu") < 2 + torch.tensor(lengths, device="npu")[:, None]
    return {"responses": torch.zeros(len(lengths), 4, device="npu"), "attention_mask": mask}


class MegatronSchedule:
    """Runs every chunk's forwards in turn; the last stage computes `losses` and returns what they report."""

    def __init__(self, last_stage=True):
        self.losses, self._last_stage = [], last_stage

    def __call__(self, *, forward_step_func, data_iterator, forward_only, num_microbatches):
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        reported = []
        for _ in range(num_microbatches):
            for iterator in iterators:
                output, loss = forward_step_func(iterator, None)
            if self._last_stage:
                value, report = loss(output)
                self.losses.append(value.item())
                reported.append(report)
        return reported


def forward_step(batches, model):
    """Run a forward as verl's does; the loss is the mean response length of the micro batch, and so are its metrics."""

    def loss(output, data, meta_info):
        mean = data["attention_mask"][:, 2:].sum(-1).float().mean()
        length = mean.item()
        metrics = {"actor/kl_loss": length, "actor/pg_loss": [length], "actor/ppo_kl": [length], "actor/kl_coef": 0.5}
        return mean, [metrics, "entropy"]

    return None, partial(loss, data=next(batches), meta_info=None)


def run(group, mode, iterator, count, forward_only=False, last_stage=True):
    """Return the losses that the last stage averages, and what it reports."""
    schedule = MegatronSchedule(last_stage)
    outputs = with_exact_loss(schedule, mode, group)(
        forward_step_func=forward_step, data_iterator=iterator, num_microbatches=count, forward_only=forward_only
    )
    return schedule.losses, outputs


def test_losses_have_their_factors_and_metrics_are_the_mini_batchs(lone_rank):
    losses, outputs = run(lone_rank, "token-mean", iter([micro_batch(1), micro_batch(3, 4)]), 2)
    assert losses == pytest.approx([1 * 1 / 8 * 2, 3.5 * 7 / 8 * 2])
    whole = 1 * 1 / 8 + 3.5 * 7 / 8
    (first, entropy), (second, _) = outputs
    assert first["actor/kl_loss"] == pytest.approx(whole) and entropy == "entropy"
    assert first["actor/pg_loss"] == first["actor/ppo_kl"] == [pytest.approx(whole)]
    assert (first["actor/kl_coef"], second) == (0.5, {"actor/kl_coef": 0.5})


def test_ranks_outside_of_the_group_weigh_nothing(lone_rank, monkeypatch):
    """Tensor-parallel ranks and ranks that share sequences belong to the world, but not to the group of the mean."""
    of_group = dist.get_world_size
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None else of_group(group))
    losses, _ = run(lone_rank, "token-mean", iter([micro_batch(1), micro_batch(3, 4)]), 2)
    assert losses == pytest.approx([1 * 1 / 8 * 2, 3.5 * 7 / 8 * 2])
    mask, value = micro_batch(1, 3)["attention_mask"][:, 2:], torch.ones(1, device="npu", requires_grad=True)
    (weighed,) = UpdateFactors("token-mean", mask, 2, 1, lone_rank).weigh(mask[:1], value)
    weighed.backward()
    assert value.grad.item() == 1 / 4 * 2  # its tokens, divided by those of two micro batches


def test_sequences_weigh_losses_and_tokens_weigh_means_over_tokens(lone_rank):
    losses, outputs = run(lone_rank, "seq-mean-token-sum", iter([micro_batch(1), micro_batch(3, 4)]), 2)
    assert losses == pytest.approx([1 * 1 / 3 * 2, 3.5 * 2 / 3 * 2])
    assert outputs[0][0]["actor/pg_loss"] == [pytest.approx(1 / 3 + 3.5 * 2 / 3)]
    assert outputs[0][0]["actor/ppo_kl"] == [pytest.approx(1 / 8 + 3.5 * 7 / 8)]


# As in verl: losses come from `agg_loss`, and these metrics from `masked_mean` over the tokens of responses.
MEANS = {
    "actor": ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"),
    "critic": ("critic/vf_clipfrac", "critic/vpred_mean"),
}
AGGREGATED = {"actor": ("actor/pg_loss", "actor/kl_loss"), "critic": ("critic/vf_loss",)}


@pytest.mark.parametrize("role", MEANS)
def test_every_metric_weighs_as_it_was_averaged(lone_rank, role):
    lengths = ((1, 1), (3, 4, 4))

    def step(batches, model):
        def loss(output, data, meta_info):
            mean = data["attention_mask"][:, 2:].sum(-1).float().mean()
            metrics = {name: mean.item() for name in (*MEANS[role], *AGGREGATED[role])}
            return mean, [metrics, "entropy"] if role == "actor" else metrics

        return None, partial(loss, data=next(batches), meta_info=None)

    schedule = with_exact_loss(MegatronSchedule(), "seq-mean-token-mean", lone_rank)
    batches = iter([micro_batch(*each) for each in lengths])
    first = schedule(forward_step_func=step, data_iterator=batches, forward_only=False, num_microbatches=2)[0]
    found = first[0] if role == "actor" else first
    one, other = (sum(each) / len(each) for each in lengths)
    by_tokens, by_sequences = (one * 2 + other * 11) / 13, (one * 2 + other * 3) / 5
    assert found == pytest.approx(dict.fromkeys(MEANS[role], by_tokens) | dict.fromkeys(AGGREGATED[role], by_sequences))


@pytest.mark.parametrize(("reported", "role"), [(OF_ACTOR, "actor"), (OF_CRITIC, "critic")])
def test_every_metric_of_fsdp_weighs_as_it_was_averaged(lone_rank, reported, role):
    mask = torch.cat([micro_batch(*each)["attention_mask"][:, 2:] for each in ((1, 1), (3, 4), (2, 2), (4, 1))])
    factors, parts = UpdateFactors("seq-mean-token-mean", mask, 4, 2, lone_rank), mask.split(2)
    for part in parts:
        factors.weigh(part)
    # verl appends one value per micro batch; metrics that are not known here are left unchanged.
    metrics = {
        name: [part.sum(-1).float().mean().item() for part in parts] for name in (reported.loss, *MEANS[role])
    } | {"actor/grad_norm": [0.25]}
    factors.report(metrics, reported)
    # The mean over two updates, each averaged over its tokens and over its sequences.
    by_tokens = ((1 * 2 + 3.5 * 7) / 9 + (2 * 4 + 2.5 * 5) / 9) / 2
    by_sequences = ((1 + 3.5) / 2 + (2 + 2.5) / 2) / 2
    expected = dict.fromkeys(MEANS[role], by_tokens) | {reported.loss: by_sequences, "actor/grad_norm": 0.25}
    assert metrics == {name: [pytest.approx(each)] for name, each in expected.items()}


def test_one_micro_batch_of_one_rank_keeps_its_bits(lone_rank):
    losses, outputs = run(lone_rank, "token-mean", iter([micro_batch(1, 3, 4)]), 1)
    assert losses == [torch.tensor(8 / 3).item()] == outputs[0][0]["actor/pg_loss"]


def test_every_chunk_of_a_virtual_pipeline_gets_the_micro_batches(lone_rank):
    batches = [micro_batch(1), micro_batch(3, 4)]
    losses, outputs = run(lone_rank, "token-mean", [iter(batches), iter(batches)], 2)
    assert losses == pytest.approx([1 * 1 / 8 * 2, 3.5 * 7 / 8 * 2])


def test_a_stage_without_the_loss_has_nothing_to_report(lone_rank):
    assert run(lone_rank, "token-mean", iter([micro_batch(1)]), 1, last_stage=False) == ([], [])


def test_forward_only_passes_go_through_untouched(lone_rank):
    iterator = iter([micro_batch(1), micro_batch(3, 4)])
    losses, reported = run(lone_rank, "token-mean", iterator, 2, forward_only=True)
    assert losses == [1.0, 3.5] and reported[1][0]["actor/pg_loss"] == [3.5]


def test_the_mode_is_verls_key():
    config = compose("rehearsal", ["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"])
    assert OverlaySettings.from_config(config.actor_rollout_ref).loss_agg_mode == "seq-mean-token-sum"
    assert OverlaySettings.from_config(config.actor_rollout_ref).exact_loss.enabled


def test_megatrons_own_division_by_tokens_rejected():
    key = "actor_rollout_ref.actor.megatron.override_transformer_config.calculate_per_token_loss"
    with pytest.raises(ConfigurationError, match=f"{key}=True makes Megatron divide by tokens that verl does not"):
        check_configuration(compose("rehearsal", [f"+{key}=true"]))
    off = "actor_rollout_ref.overlay.exact_loss.enabled=false"
    check_configuration(compose("rehearsal", [f"+{key}=true", off]))
