"""Sync windows of simulated engines, and of vLLM's engines on emulated dies against upstream's executor."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.stack_2026.rollout.windows_program import REQUESTS, Case
from tests.vllm_process import run_vllm
from verl_plugin.rollout.sync_window import (
    IDLE,
    SETTINGS_KEY,
    Offer,
    SyncWindow,
    SyncWindowError,
    SyncWindowSettings,
)

LIMIT = 16
EAGER, GRAPHS = Case("qwen3moe"), Case("deepseek", "FULL_DECODE_ONLY")
PAIRS = [(each, dataclasses.replace(each, forwards=LIMIT)) for each in (EAGER, GRAPHS)]
ADMITS = Case("qwen3moe", forwards=LIMIT, fault="admits")
FEW = Case("qwen3moe", forwards=LIMIT, fault="few")


class Engines:
    """Engines that synchronise in one process: all contribute to the reduction before any gets its result."""

    def __init__(self, number: int, limit: int) -> None:
        self.said: list[list[int]] = []
        self.heard: list[int] = []
        self.windows = [SyncWindow(rank, limit, self._reduce) for rank in range(number)]

    def _reduce(self, vector):
        self.said.append(list(vector))
        if not self.heard:
            raise _NotYet
        return self.heard

    def forward(self, offers: list[Offer]) -> list[int | None]:
        """Run one forward on every engine, and return the tokens that each runs."""
        self.said, self.heard = [], []
        for window, offer in zip(self.windows, offers, strict=True):
            if not window.left:
                with pytest.raises(_NotYet):
                    window.take(offer)
        self.heard = [max(values) for values in zip(*self.said, strict=True)]
        return [window.take(offer) for window, offer in zip(self.windows, offers, strict=True)]


class _NotYet(Exception):
    pass


def test_engines_that_decode_synchronise_once_a_window():
    engines = Engines(3, LIMIT)
    for _ in range(2 * LIMIT):
        assert engines.forward([Offer(3, True, 100), Offer(5, True, 100), IDLE]) == [5, 5, 5]
    assert [window.agreements for window in engines.windows] == [2, 2, 2]


@pytest.mark.parametrize(
    ("offers", "tokens", "left"),
    [
        ([Offer(9, False, 100), Offer(2, True, 100)], None, 0),  # any prompt: one forward, then workers ask again
        ([Offer(3, True, 5), Offer(2, True, 2)], 3, 4),  # at most the longest work
        ([IDLE, IDLE], 1, 0),  # all ranks are idle
    ],
    ids=["prompt", "work", "idle"],
)
def test_window_is_as_long_as_it_is_known_who_decodes(offers, tokens, left):
    engines = Engines(2, LIMIT)
    assert engines.forward(offers) == [tokens, tokens]
    assert [window.left for window in engines.windows] == [left, left]


@pytest.mark.parametrize("seed", range(20))
def test_engines_never_part(seed):
    """Admit random requests between windows only: in each forward all engines run the same number of tokens."""
    drawn = random.Random(seed)
    number = drawn.randint(2, 6)
    engines = Engines(number, drawn.choice((1, 3, LIMIT)))
    running: list[list[int]] = [[] for _ in range(number)]
    for _ in range(200):
        offers = []
        for rank, requests in enumerate(running):
            requests[:] = [each - 1 for each in requests if each > 1]
            prompt = not engines.windows[rank].left and drawn.random() < 0.2
            if prompt:
                requests.append(drawn.randint(1, 40))
            decoding = Offer(len(requests) * (9 if prompt else 1), not prompt, max(requests, default=0))
            offers.append(decoding if requests else IDLE)
        tokens = engines.forward(offers)
        assert len(set(tokens)) == 1
        assert tokens[0] is None or tokens[0] >= max(offer.requests for offer in offers)
        assert len({window.left for window in engines.windows}) == 1


@pytest.mark.parametrize("offer", [Offer(7, False, 9), Offer(3, True, 9)], ids=["prompt", "more requests"])
def test_forward_that_was_not_agreed_on_is_an_error(offer):
    engines = Engines(2, 4)
    engines.forward([Offer(2, True, 9), Offer(1, True, 9)])
    with pytest.raises(SyncWindowError, match=f"engine 1 cannot keep its sync window: it has {offer.requests} tokens"):
        engines.windows[1].take(offer)


def test_unequal_numbers_of_forwards_detected():
    engines = Engines(2, 1)
    engines.windows[0].forwards += 1
    with pytest.raises(SyncWindowError, match="different numbers of forwards, from 0 to 1"):
        engines.forward([IDLE, IDLE])


@pytest.mark.parametrize("forwards", [0, -1, 1.5, True, "16"])
def test_invalid_length_rejected(forwards):
    with pytest.raises(ValueError, match=rf"{SETTINGS_KEY}.forwards={forwards!r} is invalid. Set it to a whole number"):
        SyncWindowSettings(forwards)


def test_settings_come_from_additional_config():
    assert SyncWindowSettings.from_additional_config(None) == SyncWindowSettings(16)
    assert SyncWindowSettings.from_additional_config({"sync_windows": {"forwards": 4}}).forwards == 4
    with pytest.raises(ValueError, match="steps is invalid: no such option. Set one of forwards."):
        SyncWindowSettings.from_additional_config({"sync_windows": {"steps": 4}})


def engine_config(**changed):
    """Return the parts of vLLM's configuration that the check reads, for an engine that can have windows."""
    from verl_plugin.rollout import WORKER

    parallel = {"data_parallel_size": 2, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1}
    parallel |= {"decode_context_parallel_size": 1, "worker_cls": WORKER}
    whole = {"speculative_config": None, "lora_config": None, "kv_transfer_config": None, "is_moe": True}
    parallel |= {name: value for name, value in changed.items() if name in parallel}
    whole |= {name: value for name, value in changed.items() if name in whole}
    model = SimpleNamespace(is_moe=whole.pop("is_moe"))
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), model_config=model, **whole)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data_parallel_size": 1}, "there is only one engine. Set it to mp"),
        ({"is_moe": False}, "the model has no experts"),
        ({"pipeline_parallel_size": 2}, "pipeline stages"),
        ({"prefill_context_parallel_size": 2}, "splitting sequences"),
        ({"decode_context_parallel_size": 2}, "splitting sequences"),
        ({"speculative_config": "mtp"}, "drafted tokens"),
        ({"lora_config": "any"}, "adapters"),
        ({"kv_transfer_config": "any"}, "transfer their KV cache"),
        (
            {"worker_cls": "vllm_ascend.worker.worker.NPUWorker"},
            "NPUWorker is invalid: it does not support sync windows",
        ),
    ],
)
def test_engine_that_cannot_have_windows_rejected(changed, says):
    from verl_plugin.rollout.executor import _reject

    _reject(engine_config())
    with pytest.raises(ValueError, match=says):
        _reject(engine_config(**changed))


def requests_of(*each: tuple[int, int, bool]) -> list[SimpleNamespace]:
    """Make running requests from tuples: most answer tokens, tokens so far, whether the prompt is being computed."""
    return [
        SimpleNamespace(max_tokens=most, num_output_tokens=had, is_prefill_chunk=chunk, request_id=str(place))
        for place, (most, had, chunk) in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("running", "scheduled", "offered"),
    [
        ([(9, 2, False), (30, 4, False), (8, 7, False)], {"0": 1, "1": 1, "2": 1}, Offer(3, True, 26)),
        ([(9, 2, False), (9, 9, False)], {"0": 1}, Offer(2, True, 7)),  # one waits for blocks and may run later
        ([(5, 5, False)], {"0": 1}, Offer(1, True, 1)),  # its last token is in flight
        ([(9, 0, False), (9, 3, False)], {"0": 6, "1": 1}, Offer(7, False, 9)),  # a prompt of six tokens
        ([(9, 0, True), (9, 3, False)], {"0": 1, "1": 1}, Offer(2, False, 9)),  # a prompt's last chunk, one token
        ([], {"0": 1}, Offer(1, True, 1)),
    ],
)
def test_engine_offers_what_it_runs_and_may_need(running, scheduled, offered):
    from verl_plugin.rollout.executor import WindowedInProcess

    executor = object.__new__(WindowedInProcess)
    executor.scheduler = SimpleNamespace(running=requests_of(*running))
    output = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
    assert executor._offer(output) == offered


def test_executor_counts_forwards_and_tells_the_workers(monkeypatch):
    """Check that a forward with tokens uses one of the window, one without uses none, and dummy forwards use theirs."""
    from verl_plugin.rollout import executor as module

    taken, passed = [], []

    class Upstream:
        def execute_model(self, output, *arguments, **named):
            passed.append(getattr(output, module.WINDOW_TOKENS, "none"))
            return "result"

        def execute_dummy_batch(self):
            passed.append("dummy")

        def collective_rpc(self, name, args):
            passed.append((name, args))

    class Executor(module._Windowed, Upstream):
        pass

    made = Executor()
    made.scheduler = SimpleNamespace(running=requests_of((9, 2, False)))
    tokens = iter([4, None, 3, None])
    made.sync_window = SimpleNamespace(take=lambda offer: taken.append(offer) or next(tokens))
    for scheduled in ({"0": 1}, {}, {"0": 1}):
        output = SimpleNamespace(num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()))
        assert made.execute_model(output) == "result"
    for _ in range(2):
        made.execute_dummy_batch()
    assert taken == [Offer(1, True, 7)] * 2 + [IDLE] * 2
    assert passed == [4, "none", None, ("execute_window_dummy", (3,)), "dummy"]


@pytest.mark.parametrize(("left", "paused"), [(0, None), (3, "PAUSED_NEW")])
def test_scheduler_admits_between_windows_alone(left, paused):
    from vllm.v1.core.sched.interface import PauseState

    from verl_plugin.rollout.executor import WindowedInProcess

    class Upstream:
        def __init__(self) -> None:
            self.pause_state, self.seen = PauseState.UNPAUSED, []

        def set_pause_state(self, state) -> None:
            self.pause_state = state

        def schedule(self):
            self.seen.append(self.pause_state)
            return "scheduled"

    executor = object.__new__(WindowedInProcess)
    executor.sync_window = SimpleNamespace(left=left)
    scheduler = executor._scheduler_class(Upstream)()
    assert executor.scheduler is scheduler and scheduler.schedule() == "scheduled"
    assert scheduler.seen == [PauseState[paused or "UNPAUSED"]] and scheduler.pause_state is PauseState.UNPAUSED
    scheduler.pause_state = PauseState.PAUSED_ALL  # paused by some other caller
    scheduler.schedule()
    assert scheduler.seen[1] is PauseState.PAUSED_ALL is scheduler.pause_state


@pytest.mark.parametrize("eager", [True, False])
def test_worker_pads_to_the_window_on_every_rank(eager):
    """All ranks run the window's tokens, padded for sequence parallelism and to the next graph."""
    from vllm.config import CUDAGraphMode

    from verl_plugin.rollout.worker import RolloutWorker

    def dispatch(num_tokens, uniform_decode):
        assert uniform_decode
        return CUDAGraphMode.FULL, SimpleNamespace(num_tokens=8 if num_tokens == 6 else 4)

    worker = object.__new__(RolloutWorker)
    worker.model_runner = SimpleNamespace(
        _pad_for_sequence_parallelism=lambda tokens: tokens + tokens % 2, dp_size=3,
        model_config=SimpleNamespace(enforce_eager=eager), cudagraph_dispatcher=SimpleNamespace(dispatch=dispatch),
    )  # fmt: skip
    worker._ask_others = lambda tokens, *more, **named: ("asked", tokens, more, named)
    assert worker._metadata_across_dp(2, 7, further=1) == ("asked", 2, (7,), {"further": 1})
    worker._window_tokens = 5
    for own in (1, 5, 6):
        tokens, ranks, mode = worker._metadata_across_dp(own)
        assert tokens == (6 if eager else 8) and ranks.tolist() == [tokens] * 3 and ranks.dtype.is_signed
        assert mode is (CUDAGraphMode.NONE if eager else CUDAGraphMode.FULL)
    with pytest.raises(RuntimeError, match="a forward of 9 tokens is too large for its sync window of"):
        worker._metadata_across_dp(9)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, list[dict]]:
    """Results of the engines, by case: of both, or of the first where the case plants a fault."""
    folder: Path = tmp_path_factory.mktemp("windows")
    cases = [*(each for pair in PAIRS for each in pair), ADMITS, FEW]
    run_vllm(
        "tests.stack_2026.rollout.windows_program", folder, *(json.dumps(dataclasses.asdict(each)) for each in cases)
    )
    ranks = {case: (0,) if case.fault else (0, 1) for case in cases}
    return {case: [json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in ranks[case]]
            for case in cases}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("upstream", "windowed"), PAIRS, ids=["eager", "graphs"])
def test_answers_are_upstreams(found, upstream, windowed):
    """Requests wait, end and arrive within windows; log-probs differ only in the rounding of larger batches."""
    for rank, requests in enumerate(REQUESTS):
        expected, own = found[upstream][rank], found[windowed][rank]
        assert [len(tokens) for tokens in own["tokens"]] == [tokens for tokens, _ in requests]
        assert own["tokens"] == expected["tokens"]
        for log_probs, reference in zip(own["log-probs"], expected["log-probs"], strict=True):
            assert log_probs == pytest.approx(reference, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("upstream", "windowed"), PAIRS, ids=["eager", "graphs"])
def test_few_forwards_synchronise_on_the_host(found, upstream, windowed):
    for before, after in zip(found[upstream], found[windowed], strict=True):
        counts = after["counts"]
        assert before["counts"]["asked"] >= before["iterations"] and not before["counts"]["agreed"]
        assert counts["agreed"] + counts["asked"] < before["counts"]["asked"] / 5
        assert after["iterations"] <= before["iterations"] + LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("case", [ADMITS, FEW], ids=["admits within a window", "agrees on too few tokens"])
def test_broken_window_is_an_error(found, case):
    """Check the controls: each planted fault raises an error."""
    error = found[case][0]
    assert error["type"] == "SyncWindowError" and "rollout engine 0 cannot keep" in error["error"]
