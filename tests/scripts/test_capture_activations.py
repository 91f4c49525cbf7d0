"""scripts/internal/capture_activations.py: it starts one process per die and ends all when one fails; its calls to
verl's worker and its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from post_training.mismatch import capture
from post_training.mismatch.dumps import Captured, Header, TokenSequence, read_dump, write_part
from post_training.mismatch.points import EMBEDDING, FINAL_NORM
from scripts.internal import capture_activations
from scripts.internal.capture_activations import _capture

# The ranks write their environment, then do what the request says; the real stack is not imported.
RANKS = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
prepared = []
sys.modules["verl_patches.trainer.isolated_ray"] = SimpleNamespace(
    confine_worker=lambda: prepared.append("confined"), name_shared_memory=lambda: prepared.append("named"))
from scripts.internal import capture_activations as program

def capture(asked):
    rank = os.environ["RANK"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: os.environ[name] for name in names}
    writing = Path(asked["folder"]) / f"{rank}.writing"
    writing.write_text(json.dumps(given | {"prepared": prepared}))
    writing.rename(writing.with_name(rank))  # whole, whenever this rank is ended
    print(f" rank {rank} was here ", end="")
    if rank == str(asked.get("raises")):
        raise ValueError("two \\n lines " + "x" * 1000)
    if rank == str(asked.get("killed")):
        os.kill(os.getpid(), signal.SIGKILL)
    if asked.get("raises", asked.get("killed")) is not None:
        signal.pause()  # as ranks do that wait for another one

program._import_stack = lambda: prepared.append("imported")
program._capture = capture
sys.exit(program.main(Path(sys.argv[1])))
"""


def ranks(folder: Path, **asked: object) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Run the program. Return the ended process, and the environment that each rank received."""
    (folder / "request.json").write_text(json.dumps({"folder": str(folder)} | asked))
    command = [sys.executable, "-c", RANKS, str(folder / "request.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return ended, [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9]"))]


def test_each_die_has_a_process_that_knows_its_rank_and_finds_the_others(tmp_path):
    ended, given = ranks(tmp_path, ranks=3)
    assert ended.returncode == 0, ended.stderr
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in given] == [(rank, rank) for rank in "012"]
    assert {(each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"], each["MASTER_ADDR"]) for each in given} == {
        ("3", "3", "127.0.0.1")
    }
    (port,) = {each["MASTER_PORT"] for each in given}
    assert 1024 <= int(port) < 1 << 16
    assert all(each["prepared"] == ["imported", "confined", "named"] for each in given)
    assert sorted(ended.stdout.split()) == sorted("rank 0 was here rank 1 was here rank 2 was here".split())


def test_ranks_that_wait_for_one_that_failed_are_ended_and_it_is_named(tmp_path):
    ended, _ = ranks(tmp_path, ranks=3, raises=1)
    (sentence,) = [line for line in ended.stdout.splitlines() if "error: " in line]
    _, _, said = sentence.partition("error: rank 1: ValueError: ")
    assert (ended.returncode, said) == (1, ("two lines " + "x" * 300)[:300])
    assert "Traceback" in ended.stderr


def test_ranks_that_wait_for_one_that_was_killed_are_ended(tmp_path):
    assert ranks(tmp_path, ranks=2, killed=0)[0].returncode == 1


def test_a_rank_that_was_started_by_another_program_captures_by_itself(tmp_path, monkeypatch):
    request, seen = tmp_path / "request.json", []
    request.write_text('{"ranks": 2}')
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(capture_activations, "_capture", seen.append)
    monkeypatch.setattr(capture_activations, "_forked", lambda asked: pytest.fail("it is one of them already"))
    assert capture_activations.main(request) == 0 and seen == [{"ranks": 2}]


def test_the_program_reads_the_request_that_it_is_given(tmp_path):
    request = tmp_path / "request.json"
    request.write_text("no request")
    ended = subprocess.run([sys.executable, capture_activations.__file__, request], capture_output=True, text=True)
    assert ended.returncode and "JSONDecodeError" in ended.stderr.splitlines()[-1]


class Worker:
    """verl's worker; records what it is asked."""

    def __init__(self, config, role):
        self.config, self.asked, self.tokenizer = config, [role], SimpleNamespace(pad_token_id=0)
        Worker.made = self

    def init_model(self):
        self.asked.append("init_model")

    def load_checkpoint(self, path):
        self.asked.append(path)


@pytest.fixture
def rank_0(tmp_path, monkeypatch):
    """Make this process rank 0 of two, without the stack. Return its request; the second rank's parts exist."""
    modules = {name: ModuleType(name) for name in ("verl", "verl.workers", "verl.workers.megatron_workers")}
    modules["verl.workers.megatron_workers"].ActorRolloutRefWorker = Worker
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(capture_activations, "_import_stack", lambda: None)
    for name, found in (("get_world_size", 2), ("get_rank", 0), ("barrier", None)):
        monkeypatch.setattr(torch.distributed, name, lambda found=found: found)

    def captured(point, value):
        def by_rank_0(worker, sequences):
            assert worker is Worker.made and not torch.is_grad_enabled()
            return {(point, 0): rows(0, value)}

        return by_rank_0

    monkeypatch.setattr(capture, "capture_rollout", captured(EMBEDDING, 1.0))
    monkeypatch.setattr(capture, "capture_training", captured(FINAL_NORM, 2.0))
    monkeypatch.setattr(
        capture, "header_of", lambda worker, side, *said: Header(side, "float32", "Tiny", 1, said[0], {}, said[1])
    )
    for side, point, value in (("rollout", EMBEDDING, 1.0), ("training", FINAL_NORM, 2.5)):
        write_part(tmp_path / f"{side}.rank_1", {(point, 0): rows(0, value), (point, 3): rows(0, 3.0)})
    node = {"rollout": {"temperature": 0.5, "prompt_length": 2, "response_length": 1}}
    OmegaConf.save(OmegaConf.create({"actor_rollout_ref": node}), tmp_path / "config.yaml")
    outputs = {side: str(tmp_path / side) for side in ("rollout", "training")}
    asked = {"config": str(tmp_path / "config.yaml"), "checkpoint": "", "about": "a test", "outputs": outputs}
    return asked | {"sequences": [[[3, 4], [5]]]}


def rows(token: int, value: float) -> Captured:
    return Captured(torch.tensor([token]), torch.full((1, 3), value))


def test_a_rank_builds_the_worker_and_the_first_puts_all_parts_together(tmp_path, rank_0):
    _capture(rank_0)
    assert Worker.made.asked == ["actor_rollout", "init_model"]
    with pytest.raises(AttributeError, match="no_such_key"):
        _ = Worker.made.config.no_such_key
    dumps = {side: read_dump(tmp_path / side) for side in ("rollout", "training")}
    assert not list(tmp_path.glob("*.rank_*"))
    for side, dump in dumps.items():
        header = dump.header
        assert (header.side, header.temperature, header.about) == (side, 0.5, "a test")
        assert dump.sequences == (TokenSequence((3, 4), (5,)),)
    assert dumps["rollout"].points[EMBEDDING].values.tolist() == [[1.0] * 3 + [3.0] * 3]
    assert dumps["training"].points[FINAL_NORM].values.tolist() == [[2.0] * 3 + [3.0] * 3]
    assert dumps["rollout"].header.replicas == {}
    assert dumps["training"].header.replicas == {FINAL_NORM: pytest.approx(0.25)}


def test_weights_are_those_of_the_checkpoint_that_is_asked_for(rank_0):
    _capture(rank_0 | {"checkpoint": "somewhere", "outputs": {}})
    assert Worker.made.asked == ["actor_rollout", "init_model", "somewhere"]


def test_tokens_that_the_batch_does_not_hold_rejected_before_anything_is_computed(tmp_path, rank_0):
    with pytest.raises(ValueError, match="sequence 1 has 3 and 1 tokens"):
        _capture(rank_0 | {"sequences": [[[3, 4, 5], [5]]]})
    with pytest.raises(ValueError, match="begins with the padding token 0"):
        _capture(rank_0 | {"sequences": [[[0, 4], [5]]]})
    assert not (tmp_path / "rollout").exists()
