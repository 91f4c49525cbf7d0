"""A program for two ranks: a small Qwen2 trains under FSDP or FSDP2, is saved, and resumes on two ranks and on one.

Every rank writes its results to ``rank<n>.json``; test_fsdp.py checks them.
"""

import functools
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from post_training.checkpoint.resumed_rate import set_place_in_schedule
from verl_patches.features.compatibility.fully_sharded import clip_gradients, prepare
from verl_patches.features.training_checkpoint.fsdp_rank import FsdpRank, FullyShardedRank
from verl_patches.features.training_checkpoint.restoring import load_training
from verl_patches.features.training_checkpoint.saving import entries_of, rank_file, save_training

SEQUENCES, LENGTH, BEFORE, AFTER = 4, 8, 2, 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trained:
    """A new model as verl's FSDP worker wraps it, with optimizer and schedule, over two ranks or on each alone."""

    rank_of = FsdpRank

    def __init__(self, folder: Path, dtype: str, alone: bool = False, model: str = "model"):
        self._rank, self._world = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._is_critic = model == "critic"
        kind = AutoModelForTokenClassification if self._is_critic else AutoModelForCausalLM
        whole = kind.from_pretrained(folder / model, torch_dtype=torch.float32)
        self._model = self._shard(whole, DTYPES[dtype], groups[dist.get_rank()] if alone else dist.group.WORLD)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: (step + 1) / 10)

    def _shard(self, model: torch.nn.Module, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.nn.Module:
        half = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
        layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
        return FullyShardedDataParallel(
            model, process_group=group,
            auto_wrap_policy=layers, mixed_precision=half, device_id=torch.npu.current_device(), use_orig_params=False,
        )  # fmt: skip

    def _clip(self) -> None:
        self._model.clip_grad_norm_(1.0)

    def rank(self) -> FsdpRank:
        return self.rank_of(self._model, self._optimizer, self._rank, self._world)

    def step(self, number: int) -> float:
        """Run one update on the batch of step `number`. Return the mean loss over all sequences before the update."""
        tokens = torch.randint(3, 100, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(number))
        mine = tokens.chunk(self._world)[self._rank].npu()
        if self._is_critic:
            loss = (self._model(input_ids=mine).logits.squeeze(-1) - mine / 100).square().mean()
        else:
            loss = self._model(input_ids=mine, labels=mine).loss
        loss.backward()
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.schedule.step()
        losses: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(losses, loss.item())
        return sum(losses) / len(losses)

    def steps(self, first: int, count: int) -> list[float]:
        return [self.step(number) for number in range(first, first + count)]

    def save(self, folder: Path) -> None:
        save_training(rank_file(folder, self.rank(), {}, {}))

    def load(self, folder: Path, steps: int = BEFORE) -> None:
        load_training(folder, self.rank())
        set_place_in_schedule(self.schedule, steps)

    def digest(self) -> dict[str, str]:
        """Return the digest of each entry that this rank would write."""
        found = {name: tensor.cpu().contiguous() for name, tensor in entries_of(self.rank()).items()}
        return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in found.items()}


class FullyTrained(Trained):
    """The same under FSDP2."""

    rank_of = FullyShardedRank

    def _shard(self, model: torch.nn.Module, dtype: torch.dtype, group: dist.ProcessGroup) -> torch.nn.Module:
        from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
        from torch.distributed.device_mesh import DeviceMesh

        prepare()
        options = {
            "mesh": DeviceMesh.from_group(group, "npu"),
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
        }
        model.npu()
        for layer in model.model.layers:
            fully_shard(layer, **options)
        return fully_shard(model, **options)

    def _clip(self) -> None:
        clip_gradients(self._model.parameters(), 1.0)


def trained(folder: Path, dtype: str, alone: bool = False, model: str = "model") -> Trained:
    kind = FullyTrained if (folder / "strategy").read_text() == "fsdp2" else Trained
    return kind(folder, dtype, alone, model)


def resumed(folder: Path, saved: str, dtype: str, alone: bool = False, model: str = "model") -> Trained:
    other = trained(folder, dtype, alone, model)
    other.load(folder / saved)
    return other


def go_on(folder: Path, dtype: str) -> dict[str, object]:
    """Run an unbroken training, the same one resumed, and resumes with faults in the optimizer and the schedule."""
    unbroken = trained(folder, dtype)
    unbroken.steps(1, BEFORE)
    unbroken.save(folder / dtype / "two")
    found: dict[str, object] = {"losses": unbroken.steps(BEFORE + 1, AFTER), "digest": unbroken.digest()}
    again = resumed(folder, f"{dtype}/two", dtype)
    found["resumed"] = {"losses": again.steps(BEFORE + 1, AFTER), "digest": again.digest()}
    faulty = resumed(folder, f"{dtype}/two", dtype)
    for state in faulty._optimizer.state.values():
        state["step"].zero_()
    found["no steps"] = {"losses": faulty.steps(BEFORE + 1, AFTER), "digest": faulty.digest()}
    late = resumed(folder, f"{dtype}/two", dtype)
    set_place_in_schedule(late.schedule, 0)
    found["rate from the beginning"] = {"losses": late.steps(BEFORE + 1, AFTER), "digest": late.digest()}
    return found


def change_ranks(folder: Path) -> dict[str, object]:
    """Load the checkpoint of two ranks on one rank and back, and save it after each load."""
    dtype = "float32"
    alone = resumed(folder, f"{dtype}/two", dtype, alone=True)
    alone.save(folder / dtype / f"one{dist.get_rank()}")  # each rank by itself, and all write the same
    again = resumed(folder, f"{dtype}/one0", dtype)
    again.save(folder / dtype / "again")
    return {"alone": alone.steps(BEFORE + 1, 1), "again": again.steps(BEFORE + 1, 1)}


def critic_goes_on(folder: Path) -> dict[str, object]:
    """Run and resume a critic in the same way, and once with its averages set to zero."""
    dtype, model = "bfloat16", "critic"
    unbroken = trained(folder, dtype, model=model)
    unbroken.steps(1, BEFORE)
    unbroken.save(folder / dtype / model)
    found: dict[str, object] = {"losses": unbroken.steps(BEFORE + 1, AFTER), "digest": unbroken.digest()}
    again = resumed(folder, f"{dtype}/{model}", dtype, model=model)
    found["resumed"] = {"losses": again.steps(BEFORE + 1, AFTER), "digest": again.digest()}
    faulty = resumed(folder, f"{dtype}/{model}", dtype, model=model)
    faulty.rank().create_states(BEFORE)
    found["no averages"] = {"losses": faulty.steps(BEFORE + 1, AFTER), "digest": faulty.digest()}
    return found


def load_foreign(folder: Path) -> None:
    """Load and save a checkpoint of Megatron's ranks; then save a trained model whose output layer is its embedding."""
    resumed(folder, "megatron", "float32").save(folder / "float32" / "from_megatron")
    tied = trained(folder, "float32", model="tied")
    tied.steps(1, 1)
    tied.save(folder / "float32" / "tied")


def start_rank() -> None:
    dist.init_process_group("cpu:gloo,npu:hccl")
    torch.npu.set_device(dist.get_rank())


def main(folder: Path) -> None:
    start_rank()
    found = SimpleNamespace(**{dtype: go_on(folder, dtype) for dtype in DTYPES}, ranks=change_ranks(folder))
    found.critic = critic_goes_on(folder)
    load_foreign(folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(vars(found)))
    dist.destroy_process_group()
