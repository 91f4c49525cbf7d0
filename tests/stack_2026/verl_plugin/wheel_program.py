"""Hand weights over on two ranks of verl's own FSDP2 engine, with only this project's wheel installed.

    python wheel_program.py CHECKPOINT SITE

Start it by its path, so that sys.path has no folder of this project. SITE is the folder with the installed wheel.
It prints the keys that the one line of configuration sets, and the weights that differ from transformers'; if any do,
it exits with 1. Each rank has a stand-in for its die's vLLM worker, which serves the whole model.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from hydra import compose, initialize_config_module
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

WORLD = 2
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def configured() -> dict[str, object]:
    """Return the keys that the one line of configuration sets in verl's default configuration."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        found = compose("ppo_trainer", overrides=["+weight_transfer=alltoallv"]).actor_rollout_ref
    engine = found.rollout.checkpoint_engine
    return {
        "library": found.model.external_lib,
        "extension": found.rollout.engine_kwargs.vllm.worker_extension_cls,
        "backend": engine.backend,
        "module": engine.custom_backend_module,
    }


def served(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return vLLM's bfloat16 weights of the whole model, assembled from transformers' file."""
    full = safetensors.torch.load_file(checkpoint / "model.safetensors")
    for layer in sorted({name.rpartition(".self_attn.")[0] for name in full if ".self_attn.q_proj." in name}):
        for fused, parts in FUSED.items():
            rows = [full.pop(f"{layer}.{part}.weight") for part in parts]
            full[f"{layer}.{fused}.weight"] = torch.cat(rows)
    return {name: value.bfloat16() for name, value in full.items()}


def run(rank: int, checkpoint: Path, library: str) -> list[str]:
    """Run one rank's update, and return the names of weights that differ."""
    torch.npu.set_device(rank)
    dist.init_process_group("cpu:gloo,npu:hccl", rank=rank, world_size=WORLD)
    model = HFModelConfig(path=str(checkpoint), load_tokenizer=False, external_lib=library)
    from post_training.layouts.layout import RolloutPlacement
    from post_training.reshard.handover import Importer
    from verl_plugin.alltoallv.addresses import control_path
    from verl_plugin.alltoallv.control import Control, Description
    from verl_plugin.alltoallv.settings import AlltoallvSettings

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=model,
        engine_config=FSDPEngineConfig(strategy="fsdp2", forward_only=True, use_torch_compile=False),
        optimizer_config=None,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    expected = served(checkpoint)
    live = {name: torch.full_like(value, torch.nan, device="npu") for name, value in expected.items()}
    weights = {name: (tuple(value.shape), value.dtype) for name, value in live.items()}
    path = control_path(os.environ["VERL_RAY_JOB_ID"], rank)
    worker = Control(path, Description(weights, RolloutPlacement(1), AlltoallvSettings(verify=True)))
    offered, _ = engine.get_per_tensor_param()
    importer = None
    for name, content in offered:
        importer = importer or Importer(worker.manifest, live, worker.version)
        importer.take(name, content)
    importer.finish()
    path.unlink()
    dist.barrier()
    return [name for name, value in expected.items() if not torch.equal(live[name].cpu(), value)]


def main(checkpoint: Path, site: Path) -> int:
    """Compose the configuration, run one update on forked ranks, and return the exit status."""
    keys = configured()
    print(json.dumps(keys), flush=True)
    import verl_plugin.alltoallv.engines

    if not Path(verl_plugin.alltoallv.engines.__file__).is_relative_to(site):
        sys.exit(f"{verl_plugin.alltoallv.engines.__file__} is not the wheel's")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    os.environ["VERL_RAY_JOB_ID"] = f"wheel.{port}"
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            status = 1
            try:
                different = run(rank, checkpoint, str(keys["library"]))
                print(f"rank {rank}: {len(different)} weights differ {different[:3]}", flush=True)
                status = int(bool(different))
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        children.append(child)
    return int(any([os.waitpid(child, 0)[1] for child in children]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
