"""Sync windows of a vLLM instance over two nodes, with one of verl's own servers and one engine on each."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.stack_2026.rollout.nodes_program import ANSWERS, FORWARDS, MODEL, NODES, prompts
from tests.stack_2026.verl_plugin.worker_program import greedy_tokens
from verl_plugin.rollout.sync_window import EXECUTOR, EXECUTOR_KEY


def run(folder: Path, fault: str) -> tuple[int, str]:
    """Run both nodes, and return the exit status and the output. Kills engines that outlive a killed node."""
    environment = {**os.environ, "NPU_EMULATOR_CAPACITY_MB": "512", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.stack_2026.rollout.nodes_program", str(folder), fault]
    log = folder / "run.log"
    # A socket's path has at most 107 characters, and pytest's folders are too long for that.
    with log.open("w") as output, TemporaryDirectory(prefix="nodes-") as sockets:
        environment["VLLM_RPC_BASE_PATH"] = sockets
        started = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status = started.wait(600)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    return status, log.read_text()


def greedy(folder: Path) -> list[list[int]]:
    """Return the tokens that transformers generates."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32)
    lengths, given = ([each for node in nodes for each in node] for nodes in (ANSWERS, prompts()))
    pairs = zip(given, lengths, strict=True)
    return [greedy_tokens(model, {"input_ids": torch.tensor([prompt])}, length) for prompt, length in pairs]


@pytest.mark.slow
def test_engines_of_two_nodes_generate_transformers_tokens(tmp_path):
    status, output = run(tmp_path, "none")
    assert status == 0, output[-6000:]
    assert output.count(f"sync windows of up to {FORWARDS} forwards, {NODES} engines") == NODES
    assert json.loads((tmp_path / "tokens.json").read_text()) == greedy(tmp_path)


@pytest.mark.slow
def test_broken_window_of_the_other_node_is_an_error(tmp_path):
    """Control: a forward with one token less meets the other node's in a collective."""
    status, output = run(tmp_path, "few")
    assert status and not (tmp_path / "tokens.json").exists()
    assert "EI0005" in output and "rank 1 HcclAllGather" in output


def test_vllm_is_told_of_no_nodes_with_windows_alone():
    from verl_plugin.rollout.servers import without_nodes

    given = Namespace(distributed_executor_backend=EXECUTOR, nnodes=8, node_rank=3, data_parallel_start_rank=24)
    assert vars(without_nodes(given)) == {**vars(given), "nnodes": 1, "node_rank": 0}
    upstream = Namespace(distributed_executor_backend="mp", nnodes=8, node_rank=3)
    assert without_nodes(upstream) is upstream


def test_vllm_rejects_the_executor_over_nodes():
    """Show why the number of nodes is not passed: vLLM then only accepts its own executor."""
    from vllm.config import ParallelConfig

    layout = {"data_parallel_size": 4, "data_parallel_size_local": 2, "distributed_executor_backend": EXECUTOR}
    ParallelConfig(**layout)
    with pytest.raises(ValueError, match="nnodes > 1 can only be set when distributed executor backend is mp"):
        ParallelConfig(**layout, nnodes=2, master_addr="127.0.0.1")


def test_trainers_start_these_servers_where_windows_are(monkeypatch):
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_plugin.rollout.trainer import ServesWindows

    class Trainer(ServesWindows, type("Upstream", (), {"init": lambda _: None})):
        def __init__(self, executor):
            *groups, name = EXECUTOR_KEY.split(".")
            self.config = {name: executor}
            for group in reversed(groups):
                self.config = {group: self.config}

    registered = dict(RolloutReplicaRegistry._registry)
    monkeypatch.setattr(RolloutReplicaRegistry, "_registry", registered)
    upstream = registered["vllm"]
    Trainer("mp").init()
    assert registered["vllm"] is upstream
    Trainer(EXECUTOR).init()
    assert RolloutReplicaRegistry.get("vllm").__name__ == "WindowReplica"
