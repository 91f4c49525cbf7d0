"""Run a vLLM instance over two emulated nodes, with one engine on each, in verl's own servers.

`python -m tests.stack_2026.rollout.nodes_program FOLDER FAULT` writes the tokens of both engines to `tokens.json`.
With FAULT `few` the second node's engine uses one token less than agreed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from post_training.ports import reserve_ports
from tests.ranks import fork_ranks
from tests.stack_2026.vllm_ascend.models import qwen3_moe
from tests.stack_2026.vllm_ascend.program import IMPORTED_ONCE, WORKER
from tests.vllm_cases import VOCABULARY, import_once, make_prompts, write_random_model
from verl_plugin.rollout import BACKEND
from verl_plugin.rollout.sync_window import EXECUTOR

MODEL = "qwen3moe"
NODES, FORWARDS = 2, 8
# Lengths of the answers in tokens, by node.
ANSWERS = [(20, 6), (9,)]
# Not 32 as in other tests: verl's loader misreads square weights (docs/upstream/verl-square-expert-weights.md).
EXPERT_WIDTH = 48
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


def prompts() -> list[list[list[int]]]:
    """Return the prompts by node."""
    made = iter(make_prompts(sum(map(len, ANSWERS)), prefix_cache=False))
    return [[next(made) for _ in answers] for answers in ANSWERS]


def arguments(folder: Path, node: int) -> Namespace:
    """Return vLLM's arguments as verl's server of a node makes them."""
    from vllm.entrypoints.cli import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    commands = parser.add_subparsers(dest="subparser")
    for command in serve.cmd_init():
        command.subparser_init(commands)
    named = {
        "dtype": "float32", "max-model-len": 128, "max-num-seqs": 4, "seed": 0, "gpu-memory-utilization": 0.4,
        "num-gpu-blocks-override": 64, "all2all-backend": BACKEND, "worker-cls": WORKER,
        "worker-extension-cls": EXTENSION, "distributed-executor-backend": EXECUTOR,
        "additional-config": json.dumps({"sync_windows": {"forwards": FORWARDS}}),
        "data-parallel-size": NODES, "data-parallel-size-local": 1, "data-parallel-start-rank": node,
        "data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": os.environ["RPC_PORT"],
        "nnodes": NODES, "node-rank": node, "master-addr": "127.0.0.1", "master-port": os.environ["NODES_PORT"],
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in named.items()]
    flags = ["--enforce-eager", "--enable-expert-parallel", "--no-enable-prefix-caching"]
    found = parser.parse_args(["serve", str(folder / MODEL), *words, *flags])
    found.model = found.model_tag
    return found


def main(folder: Path) -> None:
    """Run one node."""
    node = int(os.environ["RANK"])
    os.environ["NPU_EMULATOR_NODE"] += f".{node}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if node and os.environ["NODES_FAULT"] == "few":
        agree_on_few()
    asyncio.run(asyncio.wait_for(serve(folder, node), 300))


async def serve(folder: Path, node: int) -> None:
    """Run verl's server without Ray."""
    from verl_plugin.rollout.servers import WindowServer

    server = object.__new__(WindowServer)
    server.replica_rank, server.node_rank, server._server_address = 0, node, "127.0.0.1"
    server._dp_master_port = int(os.environ["DP_PORT"])
    server.model_config = SimpleNamespace(tokenizer=range(VOCABULARY), processor=None)
    done = folder / "tokens.json"
    if node:
        await server.run_headless(arguments(folder, node))
        await exists(done)
        (folder / "ended").touch()
        end()
    await server.run_server(arguments(folder, node))
    places = [(rank, number) for rank, answers in enumerate(ANSWERS) for number in range(len(answers))]
    found = await asyncio.gather(*(generate(server.engine, *place) for place in places))
    done.with_suffix(".part").write_text(json.dumps(found))
    done.with_suffix(".part").rename(done)
    await exists(folder / "ended")
    end()


async def generate(engine: Any, node: int, number: int) -> list[int]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWERS[node][number], ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": prompts()[node][number]}
    tokens: list[int] = []
    async for output in engine.generate(prompt, greedy, f"{node}.{number}", data_parallel_rank=node):
        tokens = list(output.outputs[0].token_ids)
    return tokens


def agree_on_few() -> None:
    """Make the engine, a fork of this process, use one token less than agreed."""
    from verl_plugin.rollout.sync_window import SyncWindow

    agree = SyncWindow._agree

    def fewer(self: Any, offer: Any) -> None:
        agree(self, offer)
        self._tokens = None if self._tokens is None else self._tokens - 1

    SyncWindow._agree = fewer  # type: ignore[method-assign]


async def exists(path: Path) -> None:
    while not path.exists():
        await asyncio.sleep(0.1)


def end() -> None:
    """End this node and its engine, which verl's server otherwise leaves to Ray."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)


def run(folder: Path, fault: str) -> int:
    import_once((*IMPORTED_ONCE, "verl_plugin.rollout.servers"))
    config = qwen3_moe()
    config.moe_intermediate_size = EXPERT_WIDTH
    write_random_model(config, folder / MODEL)
    ports = {name: str(reserve_ports()) for name in ("RPC_PORT", "NODES_PORT", "DP_PORT")}
    os.environ |= {**ports, "NODES_FAULT": fault, "NPU_EMULATOR_NODE": f"nodes.{os.getpid()}.{time.monotonic_ns()}"}
    return fork_ranks(__spec__.name, NODES, folder)


if __name__ == "__main__":
    os.environ |= {"NPU_EMULATOR_DEVICES": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    sys.exit(run(Path(sys.argv[1]), sys.argv[2]))
