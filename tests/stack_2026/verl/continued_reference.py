"""Compute a GRPO step from a checkpoint of the stack 2025, in transformers and plain torch, in float32 on the host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from post_training.checkpoint.training_files import MOMENTS, open_training_files
from post_training.models.families import table_for
from post_training.report.run_folder import at
from post_training.user_files import read_object
from verl_plugin.step_record.folder import RecordedStep

_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Step:
    """Results of a step: log-probs by answer and token, and loss, KL and gradient norm before the update."""

    log_probs: list[torch.Tensor]
    ref_log_probs: list[torch.Tensor]
    loss: float
    kl: float
    norm: float


class Reference:
    """A checkpoint's model, with its AdamW state.

    Args:
        model: The model's folder with config.json; its weights are the KL loss's reference.
        checkpoint: `global_step_N` of a run of the stack 2025; None for the model's own weights.
        folder: Folder for this object's files.
        averages: Whether to load the checkpoint's averages; otherwise AdamW starts from scratch.
    """

    def __init__(self, model: Path, checkpoint: Path | None, folder: Path, averages: bool = True) -> None:
        self._origin = _load(model)
        self.model = _load(model)
        self.averages: dict[str, PreTrainedModel] = {}
        if checkpoint is None:
            return
        states = read_states(model, checkpoint / "actor")
        weights = states["master"] | states.get("weight", {})
        self.model = _written(model, folder / "weights", weights)
        self.steps = int(checkpoint.name.rpartition("_")[2])
        if averages:
            self.averages = {name: _written(model, folder / name, weights | states[name]) for name in MOMENTS}

    def step(self, record: RecordedStep) -> Step:
        """Run a recorded step's update; losses are means over all tokens of answers."""
        columns, coefficient = record.columns, float(at(record.config, f"{_ACTOR}.kl_loss_coef"))
        with torch.no_grad():
            kept = [_log_probs(self._origin, *sample) for sample in _samples(record)]
        logs = [_log_probs(self.model, *sample) for sample in _samples(record)]
        advantages = torch.cat([row.float() for row in columns["advantages"].rows])
        # With one update per batch the ratio to the old policy is 1, but has this gradient.
        now = torch.cat(logs)
        policy = -(advantages * (now - now.detach()).exp()).mean()
        apart = torch.cat(kept) - now
        # verl's low_var_kl, http://joschu.net/blog/kl-approx.html, clamped to 10 per token.
        kl = (apart.exp() - apart - 1).clamp(max=10).mean()
        loss = policy + coefficient * kl
        loss.backward()
        clip = float(at(record.config, f"{_ACTOR}.optim.clip_grad"))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self._update(record)
        return Step([each.detach() for each in logs], kept, loss.item(), kl.item(), norm.item())

    def _update(self, record: RecordedStep) -> None:
        own: dict[str, Any] = at(record.config, f"{_ACTOR}.optim")
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=own["lr"], betas=tuple(own["betas"]), weight_decay=own["weight_decay"]
        )
        averages = {name: dict(model.named_parameters()) for name, model in self.averages.items()}
        for name, parameter in self.model.named_parameters():
            if averages:
                state = {key: values[name].detach().clone() for key, values in averages.items()}
                optimizer.state[parameter] = {"step": torch.tensor(float(self.steps)), **state}
        optimizer.step()


def read_states(model: Path, actor: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the full tensors of a checkpoint of the stack 2025, by state and HF name."""
    sources = open_training_files(actor, table_for(read_object(model / "config.json")).shapes).sources
    found: dict[str, dict[str, torch.Tensor]] = {}
    for state, source in sources.items():
        found[state] = {}
        for name, tensor in source.tensors.items():
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            source.read_into(name, tuple((0, extent) for extent in tensor.shape), whole)
            found[state][name] = whole
    return found


def _written(model: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Write these tensors to a model folder, and load it with transformers."""
    folder.mkdir(parents=True)
    save_file({name: value.float().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    shutil.copy(model / "config.json", folder)
    return _load(folder)


def _load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def _samples(record: RecordedStep) -> list[tuple[torch.Tensor, int]]:
    """Return each sample's tokens and the length of its prompt."""
    rows = zip(record.columns["input_ids"].rows, record.columns["prompts"].rows, strict=True)
    return [(tokens, len(prompt)) for tokens, prompt in rows]


def _log_probs(model: PreTrainedModel, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1)
