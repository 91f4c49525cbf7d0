"""Slow but healthy phases and hung ones of each kind, under the shipped limits, with the real progress counters.

A unit of work is what upstream does between two counts. It advances a fake clock, during which heartbeats are sent
and judged as in a run.
"""

import asyncio
import pickle
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401

from post_training.checkpoint import durable, filling
from post_training.checkpoint.loading import fill
from post_training.hang_detection import progress
from post_training.hang_detection.limits import Watch
from post_training.hang_detection.progress import count_answers, count_optimizer_steps, file_progress
from post_training.hang_detection.settings import PHASES, EndSeconds, WarnSeconds, WatchSettings
from post_training.hang_detection.signs import TRAINER, Signs
from post_training.layouts.layout import Shard
from post_training.reshard.exchange import Exchange
from post_training.reshard.failure import Attempt
from post_training.reshard.schedule import Bucket, Direction
from verl_patches.features.training_checkpoint import saving
from verl_patches.features.training_checkpoint.host_agreement import checkpoint_progress
from verl_patches.workers.actor import dp_actor, megatron_actor
from verl_patches.workers.critic import dp_critic, megatron_critic
from verl_patches.workers.reward_manager import prime
from verl_patches.workers.sharding_manager import megatron_vllm
from vllm_patches.v1.engine import llm_engine

WARN, END = WarnSeconds(), EndSeconds()
HEARTBEAT_S = 10.0


class Job:
    """One rank, or the training loop, of a run on two ranks; the other rank always waits for it."""

    def __init__(self, own):
        self.own, self.now, self.serial = own, 0.0, 0
        self.signs, self.named = Signs(), []
        self.watch = Watch(WatchSettings(), 2, lambda: self.now)

    def beat(self):
        self.serial += 1
        idle, waiting = Signs(), Signs()
        waiting._phases = list(self.signs._phases)
        others = {TRAINER: (idle, "waits in ray.get"), "0": (idle, ""), "1": (waiting, "waits in all_reduce")}
        if self.own == TRAINER:  # the workers are idle then
            others["1"] = (idle, "")
        for name, (of, where) in (others | {self.own: (self.signs, "at mlp.py:7 in forward")}).items():
            self.watch.hear(of.now(name, self.serial, where))
        self.named += self.watch.stopped()

    def spend(self, seconds):
        """Do a unit of work of this length, while heartbeats are sent and judged."""
        self.beat()
        for _ in range(int(seconds // HEARTBEAT_S)):
            self.now += HEARTBEAT_S
            self.beat()


@pytest.fixture
def job(own_context):
    made = Job("0")
    own_context.keep(made.signs)
    return made


# The following functions run `count` units of a phase, and call `spend` in each.


def megatron_schedule(spend, *, forward_step_func, data_iterator, forward_only, num_microbatches):
    """Run as Megatron does without a pipeline: each forward and its backward in turn, then the gradient reduction."""
    for _ in range(num_microbatches):
        output, _ = forward_step_func(data_iterator, None)
        if not forward_only:
            output["log_probs"].sum().backward()
    spend()


def slow(spend, value):
    """Return a tensor whose backward also takes time."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight * value

        @staticmethod
        def backward(ctx, gradient):
            spend()
            return gradient * value

    return Backward.apply(torch.ones(2, requires_grad=True))


def megatron(patch, forward_only):
    def run(spend, count):
        def forward_step(batches, model):
            spend()
            with torch.set_grad_enabled(not forward_only):
                return {"entropy": torch.zeros(1), "log_probs": slow(spend, 2.0)}, partial(max, data=next(batches))

        batches = iter(range(count))
        patch(lambda: partial(megatron_schedule, spend))(
            forward_step_func=forward_step, data_iterator=batches, forward_only=forward_only, num_microbatches=count
        )

    return run


def fully_sharded(patch, forward_only, with_entropy):
    def run(spend, count):
        def forward(self, micro_batch):
            spend()
            with torch.set_grad_enabled(not forward_only):
                return (None, slow(spend, 2.0)) if with_entropy else slow(spend, 2.0)

        for _ in range(count):
            output = patch(forward, None, {})
            if not forward_only:
                (output[1] if with_entropy else output).sum().backward()

    return run


def optimizer_steps(spend, count):
    """Step an optimizer with torch's base class, as FSDP's and those inside Megatron's have."""
    count_optimizer_steps()

    class Slow(torch.optim.AdamW):
        def step(self, closure=None):
            spend()

    optimizer = Slow([torch.ones(1, requires_grad=True)])
    for _ in range(count):
        optimizer.step()


def decode_steps(spend, count):
    for _ in range(count):
        llm_engine.step(lambda self: spend(), None)


def progress_of_reshard():
    """Return the progress callback that the sharding manager passes to its resharder."""
    manager = mock.Mock(spec=["model_config", "actor_module", "transformer_config", "inference_engine"])
    placements = {name: mock.DEFAULT for name in ("rollout_placement", "train_placement")}
    with (
        mock.patch.multiple("post_training.layouts.placements", **placements),
        mock.patch("post_training.reshard.resharder.resharder_for") as made,
    ):
        megatron_vllm._resharder(manager)
    return made.call_args.args[-1]


def reshard_buckets(spend, count):
    nothing = Direction((0, 0), ())
    buckets = [Bucket(nothing, nothing)] * count
    exchange = Exchange("leg", buckets, None, None, None, 2, torch.device("cpu"), progress_of_reshard())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: SimpleNamespace(wait=spend))
        exchange.run(Attempt())


class Manager:
    """A reward manager that scores one answer after another, like verl's naive one."""

    def __init__(self, spend):
        self.compute_score = lambda data_source, solution_str: spend()

    def __call__(self, count):
        for _ in range(count):
            self.compute_score(data_source="gsm8k", solution_str="#### 4")


def answers(spend, count):
    manager = Manager(spend)
    count_answers(manager)
    manager(count)


def answers_of_prime(spend, count):
    async def upstream(*_):
        spend()
        return 1.0

    for _ in range(count):
        asyncio.run(prime.single_compute_score(upstream, None, "#### 4", "4", "gsm8k"))


def file_parts_written(folder, spend, count):
    """Write one tensor of a rank, contiguous on the host, in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "PART_BYTES", 1 << 10)
        patch.setattr(durable, "_write_all", lambda *_: spend())
        file = saving.RankFile(folder, "rank.safetensors", True, {"master/a[0:1]": torch.ones(count << 8)}, {})
        assert file.write()[0] == ""


def file_parts_hashed(folder, spend, count):
    class Slow(bytearray):
        """The buffer into which the file is read."""

    (folder / "file").write_bytes(bytes(count))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "_READ_BYTES", 1)
        patch.setattr(durable.hashlib, "sha256", lambda: SimpleNamespace(update=lambda _: spend(), hexdigest=str))
        patch.setattr(filling, "open_training_files", lambda *_: None)
        patch.setattr(filling, "check_states", lambda *_: None)
        patch.setattr(filling, "check_digests", lambda *_: None)
        manifest = SimpleNamespace(files={"file": None})
        patch.setattr(filling, "complete_manifest", lambda _: manifest)
        filling.checked_files(folder, SimpleNamespace(rank=0, world_size=1, shapes={}), checkpoint_progress)


def weights_read(report, spend, count):
    source = SimpleNamespace(dtype=lambda _: torch.float32, read_into=lambda *_: spend())
    for _ in range(count):
        fill(source, Shard("a", ((0, 2),), "a"), torch.empty(2), report)


KINDS = {
    "ref of Megatron": ("ref", megatron(megatron_actor.get_watched_forward_backward_func, True)),
    "old_log_prob of Megatron": ("old_log_prob", megatron(megatron_actor.get_watched_forward_backward_func, True)),
    "update of Megatron": ("update", megatron(megatron_actor.get_watched_forward_backward_func, False)),
    "values of Megatron": ("values", megatron(megatron_critic.get_watched_forward_backward_func, True)),
    "update_critic of Megatron": (
        "update_critic", megatron(megatron_critic.get_watched_forward_backward_func, False)),
    "ref of FSDP": ("ref", fully_sharded(dp_actor.watched_forward_micro_batch, True, True)),
    "old_log_prob of FSDP": ("old_log_prob", fully_sharded(dp_actor.watched_forward_micro_batch, True, True)),
    "update of FSDP": ("update", fully_sharded(dp_actor.watched_forward_micro_batch, False, True)),
    "values of FSDP": ("values", fully_sharded(dp_critic.watched_forward_micro_batch, True, False)),
    "update_critic of FSDP": ("update_critic", fully_sharded(dp_critic.watched_forward_micro_batch, False, False)),
    "optimizer steps": ("update", optimizer_steps),
    "decode steps": ("rollout", decode_steps),
    "buckets of a reshard": ("reshard", reshard_buckets),
    "answers": ("reward", answers),
    "answers of prime": ("reward", answers_of_prime),
    "answers of a validation": ("driver", answers),
    "a checkpoint's file": ("checkpoint", "file_parts_written"),
    "hashing of a checkpoint": ("checkpoint", "file_parts_hashed"),
    "reading of a checkpoint": ("checkpoint", partial(weights_read, checkpoint_progress)),
    "weights at the start": ("init", partial(weights_read, file_progress)),
}  # fmt: skip


def run_kind(job, tmp_path, kind, seconds, count):
    phase, units = KINDS[kind]
    units = partial(globals()[units], tmp_path) if isinstance(units, str) else units
    job.own = TRAINER if phase in ("reward", "driver") else "0"
    with job.signs.phase(phase):
        units(partial(job.spend, seconds), count)
    return phase


def test_every_phase_with_units_is_in_the_table():
    assert {phase for phase, _ in KINDS.values()} == set(PHASES) - {"start"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_slow_phase_is_not_named(job, tmp_path, kind):
    """Each unit takes most of the first limit; together they exceed the second."""
    phase = KINDS[kind][0]
    unit = 0.9 * getattr(WARN, phase)
    run_kind(job, tmp_path, kind, unit, int(getattr(END, phase) // unit) + 2)
    assert job.named == [] and job.now > getattr(END, phase)


@pytest.mark.parametrize("kind", KINDS)
def test_without_its_counts_a_slow_phase_is_named(job, tmp_path, kind, monkeypatch):
    """The control: the counts of this kind are what keeps the phase from being reported."""
    monkeypatch.setattr(Signs, "progress", lambda *_: None)
    phase = KINDS[kind][0]
    unit = 0.9 * getattr(WARN, phase)
    run_kind(job, tmp_path, kind, unit, int(getattr(END, phase) // unit) + 2)
    assert {(stop.name, stop.phase) for stop in job.named} == {(job.own, phase)}
    assert job.named[-1].beyond_end


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_phase_is_named_and_ends_the_run(job, tmp_path, kind):
    """One unit takes longer than the second limit."""
    phase = KINDS[kind][0]
    run_kind(job, tmp_path, kind, getattr(END, phase) + 2 * HEARTBEAT_S, 1)
    assert {(stop.name, stop.phase) for stop in job.named} == {(job.own, phase)}
    assert job.named[-1].beyond_end and "has made no progress" in job.named[-1].sentence()


def moves(job, kind, tmp_path, count):
    job.spend = lambda *_: None
    run_kind(job, tmp_path, kind, 0.0, count)
    return job.signs._moves - 2  # the phase's begin and end count too


@pytest.mark.parametrize("forward, both, kind", [(1, 2, "of Megatron"), (0, 2, "of FSDP")])
def test_micro_batches_are_counted(job, tmp_path, forward, both, kind):
    """N forwards count N, N forwards with backward count 2 N; Megatron's schedule adds one at its end."""
    at_the_end = 1 if "Megatron" in kind else 0
    for phase in ("ref", "values"):
        job.signs._moves = 0
        assert moves(job, f"{phase} {kind}", tmp_path, 5) == 5 + at_the_end
    for phase in ("update", "update_critic"):
        job.signs._moves = 0
        assert moves(job, f"{phase} {kind}", tmp_path, 5) == 2 * 5 + at_the_end


def test_a_backward_through_two_outputs_counts_once(job):
    both = torch.ones(2, requires_grad=True) * 2
    progress.finished_forward({"log_probs": both[:1], "entropy": both[1:], "name": "micro batch"})
    assert job.signs._moves == 1


def test_a_thread_beside_the_main_one_counts_in_its_phase_alone():
    """A checkpoint is written in the background of the next rollout; it must not hide a hang of that rollout."""
    own = Signs()
    own.progress("checkpoint")
    with own.phase("rollout"):
        own.progress("checkpoint")
        assert own._moves == 1
        with own.phase("checkpoint"):
            own.progress("checkpoint")
            assert own._moves == 3


def test_a_reward_function_is_counted_once_and_is_pickled(job):
    manager = SimpleNamespace(compute_score=max)
    count_answers(manager)
    count_answers(manager)
    assert pickle.loads(pickle.dumps(manager.compute_score)).score is max
    assert manager.compute_score(3, 4) == 4 and job.signs._moves == 1
    count_answers(len)  # another kind of manager is left alone


def test_a_rank_that_waits_for_a_slow_writer_is_not_named(job):
    """It sends heartbeats and waits in the agreement; it has made no progress of its own for hours."""
    with job.signs.phase("checkpoint"):
        for _ in range(10):
            job.spend(0.9 * WARN.checkpoint)
            checkpoint_progress(1)
    assert job.named == [] and job.now > 2 * END.checkpoint


def test_optimizer_steps_are_counted_once(monkeypatch):
    hooks = []
    monkeypatch.setattr(progress, "_optimizer_hooks", [])
    monkeypatch.setattr(progress, "register_optimizer_step_post_hook", lambda hook: hooks.append(hook) or hook)
    count_optimizer_steps()
    count_optimizer_steps()
    assert len(hooks) == 1
