"""A small Qwen3 with one output per token, and the gradients of its value loss in one plain pass over a batch."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForTokenClassification

from tests.post_training.models.megatron.qwen3_checkpoint import SIZES
from tests.verl_patches.features.exact_loss.test_shares import AGGREGATIONS
from tests.verl_patches.features.exact_loss.whole_pass import PROMPT, RESPONSE, SEQUENCES, make_batch

CLIP = 0.5
PASSES = {"all": slice(None), "first": slice(8), "second": slice(8, None)}


def build_critic() -> torch.nn.Module:
    """Build the critic in float32 and without dropout, as verl does."""
    torch.manual_seed(7)
    config = Qwen3Config(
        architectures=["Qwen3ForTokenClassification"], num_labels=1, classifier_dropout=0.0, hidden_dropout="0", **SIZES
    )
    model = Qwen3ForTokenClassification._from_config(config, attn_implementation="eager").float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def make_value_batch() -> dict[str, torch.Tensor]:
    """Return the columns of a critic's update; some predictions lie farther than the clip from the old values."""
    batch, generator = make_batch(), torch.Generator().manual_seed(3)
    noise = torch.randn(2, SEQUENCES, RESPONSE, generator=generator)
    mask = batch["attention_mask"][:, PROMPT:]
    columns = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids", "responses")}
    # All returns lie on one side, so that gradients of different tokens do not cancel.
    return columns | {"values": noise[0] * mask, "returns": 4 + noise[1]}


def unpadded_values(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return values [sequences, response length] at the states that choose the tokens; the model sees no padding."""
    found = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        padded = torch.zeros(len(mask), dtype=torch.float64)
        outputs = model(input_ids=ids[mask][None]).logits[0, :, 0]
        found.append(padded.index_put((mask.nonzero().flatten(),), outputs)[PROMPT - 1 : -1])
    return torch.stack(found)


def value_loss(values: torch.Tensor, batch: dict[str, torch.Tensor], mode: str) -> torch.Tensor:
    """Return PPO's clipped value loss, aggregated over the whole batch at once."""
    old, returns, mask = batch["values"], batch["returns"], batch["attention_mask"][:, PROMPT:]
    clipped = old + (values - old).clamp(-CLIP, CLIP)
    return AGGREGATIONS[mode](torch.maximum((values - returns) ** 2, (clipped - returns) ** 2), mask)


def write_value_reference(folder: Path, modes: tuple[str, ...]) -> None:
    """Write ``critic/`` and ``critic.pt``: the batch, the values, and by mode and rows the loss and all gradients.

    transformers computes them in float64 from the saved float32 weights.
    """
    model = build_critic()
    model.save_pretrained(folder / "critic")
    batch = make_value_batch()
    values = unpadded_values(model.double(), batch)
    found: dict[str, Any] = {}
    for mode in modes:
        for name, rows in PASSES.items():
            model.zero_grad()
            loss = value_loss(values[rows], {key: each[rows] for key, each in batch.items()}, mode)
            loss.backward(retain_graph=True)
            gradients = {weight: parameter.grad.float() for weight, parameter in model.named_parameters()}
            found[f"{mode}/{name}"] = {"losses": [loss.item()], "gradients": gradients}
    kept = {"batch": batch, "passes": found, "values": values.detach() * batch["attention_mask"][:, PROMPT:]}
    torch.save(kept, folder / "critic.pt")
