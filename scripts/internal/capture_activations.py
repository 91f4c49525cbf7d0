#!/usr/bin/env python3
"""Record what rollout and training compute from given tokens: `capture_activations.py REQUEST`.

compare_log_probs.py writes REQUEST, a JSON file, and starts this program. On emulated dies it starts it once, and a
process per die is forked after the imports, which they share; on NPUs, torch.distributed.run starts a process for each
die of a node. For a job on several nodes, start it with torch.distributed.run on each node, with a REQUEST on storage
that all nodes share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_LOOPBACK = "127.0.0.1"
_LONGEST = 300


def main(request: Path) -> int:
    """Capture the sides and return the exit code."""
    asked = json.loads(request.read_text())
    if "RANK" in os.environ:
        _capture(asked)
        return 0
    _import_stack()
    return _forked(asked)


def _import_stack() -> None:
    import verl_patches.prelude_patch  # noqa: F401, I001
    import vllm  # noqa: F401
    import verl.workers.megatron_workers  # noqa: F401
    import verl.workers.rollout.vllm_rollout  # noqa: F401
    import verl.workers.sharding_manager.megatron_vllm  # noqa: F401


def _forked(asked: dict[str, Any]) -> int:
    """Fork a process for each emulated die; if one fails, kill the others, which would wait for it."""
    import traceback

    from post_training.ports import reserve_ports
    from verl_patches.trainer.isolated_ray import confine_worker, name_shared_memory

    confine_worker()
    name_shared_memory()  # so that remains of a killed rank are removed with the temporary folder
    ranks, port, children = asked["ranks"], str(reserve_ports()), set()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": port,
            }  # fmt: skip
            code = 1
            try:
                _capture(asked)
                code = 0
            except BaseException as error:
                traceback.print_exc()
                message = " ".join(str(error).split())[:_LONGEST]
                # In one write: print writes the line's end separately, and other ranks could write in between.
                sys.stdout.write(f"error: rank {rank}: {type(error).__name__}: {message}\n")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # Without destructors: an engine's would only hide the error.
                os._exit(code)
        children.add(child)
    failed = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not failed:
            failed = 1
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


def _capture(asked: dict[str, Any]) -> None:
    """Build verl's worker on this rank as its trainer does, and capture the requested sides."""
    _import_stack()
    import torch
    from omegaconf import OmegaConf
    from verl.workers.megatron_workers import ActorRolloutRefWorker

    from post_training.mismatch.capture import capture_rollout, capture_training, check_lengths, header_of
    from post_training.mismatch.dumps import TokenSequence

    config = OmegaConf.load(asked["config"])
    OmegaConf.set_struct(config, True)
    node = config.actor_rollout_ref
    worker = ActorRolloutRefWorker(config=node, role="actor_rollout")
    worker.init_model()
    if asked["checkpoint"]:
        worker.load_checkpoint(asked["checkpoint"])
    sequences = [TokenSequence(tuple(prompt), tuple(response)) for prompt, response in asked["sequences"]]
    check_lengths(worker.config, sequences, worker.tokenizer.pad_token_id)
    captures = {"rollout": capture_rollout, "training": capture_training}
    for side, output in asked["outputs"].items():
        with torch.no_grad():
            part = captures[side](worker, sequences)
        header = header_of(worker, side, float(node.rollout.temperature), asked["about"])
        _write(Path(output), header, sequences, part)


def _write(output: Path, header: Any, sequences: Any, part: Any) -> None:
    """Write this rank's part beside `output`; rank 0 merges all parts."""
    import dataclasses

    import torch.distributed as dist

    from post_training.mismatch.dumps import Dump, merged, read_part, write_dump, write_part

    parts = [output.with_name(f"{output.name}.rank_{rank}") for rank in range(dist.get_world_size())]
    write_part(parts[dist.get_rank()], part)
    dist.barrier()
    if dist.get_rank() == 0:
        points, replicas = merged(map(read_part, parts))
        write_dump(output, Dump(dataclasses.replace(header, replicas=replicas), tuple(sequences), points))
        for file in parts:
            file.unlink()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
