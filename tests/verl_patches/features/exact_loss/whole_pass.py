"""A small Qwen3, a batch whose responses have 1 to 64 tokens, and the gradients of one plain pass over all of it."""

from pathlib import Path
from typing import Any

import torch

from tests.post_training.models.megatron.deepseek_v3_checkpoint import VOCABULARY
from tests.post_training.models.megatron.qwen3_checkpoint import build_model
from tests.verl_patches.features.exact_loss.test_shares import AGGREGATIONS

PROMPT, RESPONSE, SEQUENCES = 6, 64, 16
LENGTHS = [1, 64, 2, 60, 5, 33, 1, 47, 3, 64, 9, 21, 1, 55, 14, 2]
CLIP, ENTROPY, KL = 0.2, 0.01, 0.1
# DAPO: ratios up to 1 + HIGH, the mean over all tokens, and no token of a cut answer, which is one of full width.
HIGH, DAPO = 0.28, "token-mean/DAPO"
OF_DAPO = {
    f"DAPO {name}": {"mode": "token-mean", "high": HIGH, "cut_left_out": True, "against": DAPO} | cut
    for name, cut in {"2": {"micro": 2}, "at most 160": {"limit": 160}}.items()
}
# DAPO without one of its parts.
NOT_DAPO = {
    "both clips alike": OF_DAPO["DAPO 2"] | {"high": None},
    "cut answers in": OF_DAPO["DAPO 2"] | {"cut_left_out": False},
    "sequences averaged": OF_DAPO["DAPO 2"] | {"mode": "seq-mean-token-sum"},
}


def make_batch(seed: int = 2) -> dict[str, torch.Tensor]:
    """Return the columns of verl's update: left-padded prompts, right-padded responses, one advantage per sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (SEQUENCES, PROMPT + RESPONSE), generator=generator)
    positions = torch.arange(PROMPT + RESPONSE)
    prompts = torch.tensor([1 + row % PROMPT for row in range(SEQUENCES)])[:, None]
    mask = (positions >= PROMPT - prompts) & (positions < PROMPT + torch.tensor(LENGTHS)[:, None])
    noise = torch.randn(3, SEQUENCES, RESPONSE, generator=generator)
    return {
        "input_ids": ids * mask,
        "attention_mask": mask.long(),
        "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0),
        "responses": (ids * mask)[:, PROMPT:].contiguous(),
        "old_log_probs": noise[0] / 5 - 4,
        "ref_log_prob": noise[1] / 5 - 4,
        "advantages": (0.7 + noise[2][:, :1]).expand(-1, RESPONSE).contiguous(),
    }


def whole_losses(
    logits: torch.Tensor, batch: dict[str, torch.Tensor], mode: str, high: float = CLIP
) -> list[torch.Tensor]:
    """Return PPO's clipped loss, the entropy and the low-variance KL, each aggregated over the whole batch at once."""
    log_probs = logits[:, PROMPT - 1 : -1].log_softmax(dim=-1)
    chosen = log_probs.gather(-1, batch["responses"][..., None]).squeeze(-1)
    mask, advantages = batch["attention_mask"][:, PROMPT:], batch["advantages"]
    ratio = (chosen - batch["old_log_probs"]).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + high))
    policy = torch.where(advantages < 0, torch.minimum(policy, -advantages * 3.0), policy)  # dual clip
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
    distance = batch["ref_log_prob"] - chosen
    kl = (distance.exp() - distance - 1).clamp(-10, 10)
    return [AGGREGATIONS[mode](each, mask) for each in (policy, entropy, kl)]


def unpadded_logits(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return logits [sequences, length, vocabulary], zero at padding, which the model never sees."""
    logits = []
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        padded = torch.zeros(len(mask), VOCABULARY, dtype=torch.float64)
        logits.append(padded.index_put((mask.nonzero().flatten(),), model(input_ids=ids[mask][None]).logits[0]))
    return torch.stack(logits)


def without_cut(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `batch` with the tokens of answers that have all RESPONSE tokens masked out."""
    mask = batch["attention_mask"].clone()
    mask[mask[:, PROMPT:].all(dim=-1), PROMPT:] = 0
    return batch | {"attention_mask": mask}


def write_reference(folder: Path, modes: tuple[str, ...]) -> None:
    """Write ``checkpoint/`` and ``reference.pt``: the batch, and by mode and rows the losses and all gradients.

    The passes include DAPO's. transformers computes them in float64 from the saved float32 weights.
    """
    model = build_model("qwen3")
    # The error of float32 log-probs grows with their size, and gradients inherit it; smaller logits keep it small.
    model.lm_head.weight.data.mul_(0.1)
    model.save_pretrained(folder / "checkpoint")
    batch = make_batch()
    logits = unpadded_logits(model.double(), batch)
    parts = {"all": slice(None), "first": slice(8), "second": slice(8, None)}
    passes = {
        f"{mode}/{name}": (rows, {key: value[rows] for key, value in batch.items()}, mode, CLIP)
        for mode in modes
        for name, rows in parts.items()
    }
    passes[DAPO] = slice(None), without_cut(batch), "token-mean", HIGH
    found: dict[str, Any] = {}
    for name, (rows, part, mode, high) in passes.items():
        model.zero_grad()
        policy, entropy, kl = whole_losses(logits[rows], part, mode, high)
        (policy - ENTROPY * entropy + KL * kl).backward(retain_graph=True)
        gradients = {weight: parameter.grad.float() for weight, parameter in model.named_parameters()}
        found[name] = {"losses": [policy.item(), kl.item()], "gradients": gradients}
    torch.save({"batch": batch, "passes": found}, folder / "reference.pt")
