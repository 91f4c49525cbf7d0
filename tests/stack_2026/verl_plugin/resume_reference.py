"""Reference training with transformers and torch only, and its checkpoint as the stack 2025 writes one."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from post_training.checkpoint.durable import Written
from post_training.checkpoint.manifest import Manifest
from tests.vllm_cases import VOCABULARY

OPTIMIZER: dict[str, Any] = {
    "lr": 1e-2, "clip_grad": 1e9, "weight_decay": 0.0, "total_training_steps": 20, "lr_warmup_steps": 10,
}  # fmt: skip
"""The learning rate is still warming up after the few updates of a test."""
IDS = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))


def gradient(weight: torch.Tensor, number: int) -> torch.Tensor:
    """Return an update's gradient, a function of each element. Its magnitude varies, so that second averages do too."""
    return torch.sin(weight * 37 + number) * weight.abs()


def loss_of(logits: torch.Tensor) -> float:
    """Return the mean loss of the fixed sequence, from logits of shape (1, tokens, vocabulary)."""
    return float(torch.nn.functional.cross_entropy(logits[0, :-1].double(), IDS[0, 1:]))


class Reference:
    """Model updated on the host by torch's AdamW, in float32."""

    def __init__(self, checkpoint: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.begin(0)

    def begin(self, number: int) -> None:
        """Begin anew with the optimizer and the warm-up behind update `number`."""
        self.begun = number
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=OPTIMIZER["weight_decay"])

    def update(self, number: int) -> None:
        """Run update `number`, counted from 1, with the learning rate of the engines' warm-up."""
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIMIZER["lr"] * (number - self.begun - 1) / OPTIMIZER["lr_warmup_steps"]
        for parameter in self.model.parameters():
            parameter.grad = gradient(parameter.detach(), number)
        self.optimizer.step()

    def loss(self) -> float:
        """Return the loss of the fixed sequence."""
        with torch.no_grad():
            return loss_of(self.model(input_ids=IDS).logits)

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return weights and optimizer averages by state and HF name, as transformers writes a model."""
        found = {"master": self._by_name()}
        weights = {parameter: parameter.detach().clone() for parameter in self.model.parameters()}
        for state in ("exp_avg", "exp_avg_sq"):
            with torch.no_grad():
                for parameter in weights:
                    parameter.copy_(self.optimizer.state[parameter][state])
            found[state] = self._by_name()
        with torch.no_grad():
            for parameter, weight in weights.items():
                parameter.copy_(weight)
        found["weight"] = {name: found["master"].pop(name) for name in list(found["master"]) if _is_buffer(name)}
        for state in ("exp_avg", "exp_avg_sq"):
            found[state] = {name: value for name, value in found[state].items() if not _is_buffer(name)}
        return found

    def _by_name(self) -> dict[str, torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return safetensors.torch.load_file(Path(folder) / "model.safetensors")


def _is_buffer(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def write_checkpoint_of_2025(folder: Path, states: Mapping[str, Mapping[str, torch.Tensor]], steps: int) -> None:
    """Write three ranks' files, each with a third of the rows of every tensor; docs/checkpoints.md has the format."""
    files: dict[str, dict[str, torch.Tensor]] = {f"rank-0000{rank}-of-00003.safetensors": {} for rank in range(3)}
    for state, tensors in states.items():
        for name, value in tensors.items():
            first = 0
            for content, part in zip(files.values(), value.tensor_split(3), strict=True):
                bounds = [(first, first + len(part)), *((0, extent) for extent in value.shape[1:])]
                if len(part):
                    entry = f"{state}/{name}[{','.join(f'{start}:{stop}' for start, stop in bounds)}]"
                    content[entry] = part.contiguous()
                first += len(part)
    folder.mkdir(parents=True)
    written = {}
    for file, content in files.items():
        safetensors.torch.save_file(content, folder / file, {"optimizer_steps": str(steps)})
        data = (folder / file).read_bytes()
        written[file] = Written(len(data), hashlib.sha256(data).hexdigest())
    Manifest({}, files=written, complete=True).write(folder)
