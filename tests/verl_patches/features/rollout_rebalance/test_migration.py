"""One rank's part in migrating requests, with stand-ins for its engine and for the other rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch_npu  # noqa: F401

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from post_training.plan.rebalance import Move
from verl_patches.features.dp_sync.sync_window import ReducedState
from verl_patches.features.measure import step_record
from verl_patches.features.rollout_rebalance import migration as module
from verl_patches.features.rollout_rebalance.migration import MigratedRequest, RequestMigration
from verl_patches.features.rollout_rebalance.requests import FinishedRequest, MovingRequest, Sampled, joined

NOTHING = Sampled([], [], [], [])
DECODING = ReducedState((4, 4), (4, 1), False, False, 1, 0, running=(5, 1), headroom=(9, 9))


def output(request_id, *tokens, reason=None):
    return EngineCoreOutput(request_id, list(tokens), finish_reason=reason)


class Core:
    """Rank 0's engine. `requests`: the number of tokens of each running request, by id."""

    def __init__(self, generator=None, **requests):
        self.added, self.finished, self.generator = [], [], generator
        running = [self._request(name, tokens) for name, tokens in requests.items()]
        runner = SimpleNamespace(requests={name: SimpleNamespace(generator=generator) for name in requests})
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.scheduler = SimpleNamespace(
            running=running, finish_requests=lambda *given: self.finished.append(given), make_stats=lambda: None
        )
        self.add_request = self.added.append

    @staticmethod
    def _request(name, tokens):
        request = Request(name, [1] * (tokens - 1), None, None, None, SamplingParams(max_tokens=9), eos_token_id=2)
        request.append_output_token_ids([8])
        return request


@pytest.fixture
def record(monkeypatch, own_context):
    monkeypatch.setattr(module, "total", lambda values, group: values)
    return own_context.of(step_record.StepRecord)


@pytest.fixture
def migration(monkeypatch, record):
    """Return rank 0's migration of 2. Items that it sends are appended to `sent`, and it receives `arriving`."""
    group = SimpleNamespace(rank_in_group=0, world_size=2, device_group=None)
    made = RequestMigration(SimpleNamespace(group=group, window=SimpleNamespace(agreement=DECODING, left=0)))
    made.sent, made.arriving = [], []

    def exchanged(self, items, kind):
        self.sent.append(items)
        return self.arriving

    monkeypatch.setattr(RequestMigration, "_exchanged", exchanged)
    return made


def arriving(generator=None):
    params = SamplingParams(max_tokens=3)
    import msgspec

    return MovingRequest(1, "7", [5, 6], msgspec.msgpack.encode(params), 2, generator, NOTHING)


@pytest.mark.parametrize(
    ("changes", "sizes", "moves"),
    [
        ({}, (2, 4, 8), True),
        ({"with_prefill": True}, (2, 4, 8), False),
        ({"waiting": True}, (2, 4, 8), False),
        ({}, (), False),
        ({"running": (3, 3)}, (2, 4, 8), False),
        ({"headroom": (0, 0)}, (2, 4, 8), False),
    ],
)
def test_what_is_planned_follows_from_the_agreement(migration, changes, sizes, moves):
    assert migration.plan(replace(DECODING, **changes), sizes) is moves


def test_the_shortest_leave_and_those_of_others_are_taken_in(migration):
    migration._due, migration.arriving = [Move(0, 1, 2), Move(1, 0, 1)], [arriving()]
    core = Core(a=9, b=5, c=7)
    migration.move(core)
    (leaving,) = migration.sent
    assert leaving[0] == [] and [each.home_id for each in leaving[1]] == ["b", "c"]
    first = leaving[1][0]
    assert (first.home, first.tokens, first.end_token, first.generator) == (0, [1, 1, 1, 1, 8], 2, None)
    assert first.sampled == NOTHING and migration.migrated_out == {"b", "c"}
    assert core.finished == [("b", RequestStatus.FINISHED_ABORTED), ("c", RequestStatus.FINISHED_ABORTED)]
    (added,) = core.added
    assert (added.request_id, added.prompt_token_ids, added.eos_token_id) == ("7@1", [5, 6], 2)
    assert migration.migrated_in == {"7@1": MigratedRequest(1, "7", NOTHING)}
    migration.move(core)
    assert len(migration.sent) == 1, "it moves once"


def test_nothing_moves_within_a_window_and_a_new_rollout_forgets_the_last(migration):
    migration._due, migration.loop.window.left = [Move(0, 1, 1)], 1
    migration.move(Core(a=9))
    assert migration.sent == [] and migration._due
    migration.migrated_in["7@1"], migration.loop.window.agreement, migration.loop.window.left = (
        MigratedRequest(1, "7", NOTHING),
        None,
        0,
    )
    migration.migrated_out.add("a")
    migration.move(Core(a=9))
    assert (migration.sent, migration._due, migration.migrated_in, migration.migrated_out) == ([], [], {}, set())


def test_migrated_request_moves_on_with_its_samples(migration):
    sampled = joined([output("7", 3)])
    migration.migrated_in["7@1"] = MigratedRequest(1, "7", sampled, [output("7@1", 4)])
    core = Core(**{"7@1": 6})
    migration._due = [Move(0, 1, 1)]
    migration.move(core)
    (moved,) = migration.sent[0][1]
    assert (moved.home, moved.home_id, moved.sampled.tokens) == (1, "7", [3, 4])
    assert not migration.migrated_in and not migration.migrated_out


def test_random_numbers_go_on_where_they_were(migration):
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    migration._due, core = [Move(0, 1, 1)], Core(generator, a=4)
    migration.move(core)
    state = migration.sent[0][1][0].generator
    expected = torch.rand(2, generator=generator)

    migration._due, migration.arriving = [Move(1, 0, 1)], [arriving(state)]
    migration.move(core)
    there = {name: SimpleNamespace(generator=torch.Generator()) for name in ("7@1", "other")}
    untouched = there["other"].generator.get_state()
    for _ in range(2):
        scheduled = SimpleNamespace(scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in there])
        migration.restore_generators(SimpleNamespace(requests=there), scheduled)
    assert torch.equal(torch.rand(2, generator=there["7@1"].generator), expected)
    assert torch.equal(there["other"].generator.get_state(), untouched)


def test_outputs_of_migrated_requests_come_home_once(migration):
    migration.migrated_in["7@1"] = MigratedRequest(1, "7", NOTHING)
    migration._arrived = [output("a", 1, 2, reason=FinishReason.STOP)]
    outputs = {0: EngineCoreOutputs(outputs=[output("7@1", 4), output("own", 5)])}
    found = migration.own_outputs(Core(), outputs)
    assert [each.request_id for each in found[0].outputs] == ["own", "a"]
    assert [each.new_token_ids for each in migration.migrated_in["7@1"].outputs] == [[4]]
    assert migration.own_outputs(Core(), {}) == {}
    migration._arrived = [output("b", 1)]
    assert [each.request_id for each in migration.own_outputs(Core(), {})[0].outputs] == ["b"]


def test_at_the_end_results_go_home_and_what_moved_is_counted(migration, record):
    migration._due = [Move(0, 1, 2)]
    migration.move(Core(a=9, b=5))
    migration.migrated_in["7@1"] = MigratedRequest(1, "7", NOTHING, [output("7@1", 4, reason=FinishReason.LENGTH)])
    migration._moved_bytes = 30
    migration.arriving = [FinishedRequest("a", joined([output("a", 1, reason=FinishReason.STOP)]))]
    migration.ended()
    mine, theirs = migration.sent[1]
    assert mine == [] and [(each.home_id, each.sampled.tokens) for each in theirs] == [("7", [4])]
    assert (
        migration.migrated_out == {"b"}
        and not migration.migrated_in
        and [each.request_id for each in migration._arrived] == ["a"]
    )
    assert record.counts == {"rollout/moved_requests": 2, "rollout/moved_bytes": 30}


def test_without_moves_the_end_exchanges_nothing_and_counts_it(migration, record):
    migration.ended()
    assert migration.sent == [] and record.counts == {"rollout/moved_requests": 0, "rollout/moved_bytes": 0}


def test_engine_steps_for_migrated_requests_between_steps(migration):
    core = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: True))
    assert migration.has_work(core)
    with pytest.raises(KeyError), migration.stepping():
        assert not migration.has_work(core)
        raise KeyError
    assert migration.has_work(core)
    core.scheduler.has_requests = lambda: False
    assert not migration.has_work(core)


@pytest.mark.parametrize("requests", [[], [arriving(), arriving(b"state")]])
def test_bytes_of_an_exchange_are_counted(monkeypatch, requests):
    """A single rank receives what it sends."""
    monkeypatch.setattr(module.dist, "all_to_all_single", lambda into, given, *_, group: into.copy_(given))
    alone = RequestMigration(SimpleNamespace(group=SimpleNamespace(device_group=None)))
    assert alone._exchanged([requests], MovingRequest) == requests
    assert alone._moved_bytes == len(module.encoded(requests))


def test_the_mover_of_a_loop_is_asked_while_it_is_there(monkeypatch, own_context):
    asked = []
    monkeypatch.setattr(RequestMigration, "restore_generators", lambda self, *given: asked.append(given))
    module.restore_generators("runner", "scheduled")
    assert asked == [], "nothing has moved in this process"
    first, second = SimpleNamespace(migration=None), SimpleNamespace(migration=None)
    with module.migration_of(first) as made:
        assert first.migration is made
    with module.migration_of(first) as again:
        assert again is made
    with module.migration_of(second) as other:
        assert other is not made and second.migration is other
    assert first.migration is None and second.migration is None
    module.restore_generators("runner", "scheduled")
    assert asked == [("runner", "scheduled")]
