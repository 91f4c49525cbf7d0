"""Compute an answer's log-probs with transformers' Qwen3 on an emulated die, with and without the invariant forward.

`main(folder)` reads the rollout's answer from `answer.json` and writes `training.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401
from transformers import AutoModelForCausalLM
from verl.models.transformers.npu_patch import apply_npu_patches
from verl.utils.torch_functional import logprobs_from_logits

from tests.vllm_cases import VOCABULARY
from verl_plugin.batch_invariance.situations import make_prompts
from verl_plugin.batch_invariance.worker import PROMPT

Tokens = list[int]


def log_probs(model: Any, prompt: Tokens, answer: Tokens, padding: int = 0, packed: Tokens | None = None) -> Tokens:
    """Return the answer's log-probs as verl computes them, with the sequence left-padded or packed behind another."""
    sequence, mask = [*prompt, *answer], None
    front = packed or [0] * padding
    positions = [*range(len(front)), *range(len(sequence))]
    if packed is None:
        mask = torch.tensor([[0] * padding + [1] * len(sequence)]).npu()
        positions = [0] * padding + [*range(len(sequence))]
    ids = torch.tensor([[*front, *sequence]]).npu()
    with torch.no_grad():
        logits = model(
            input_ids=ids, position_ids=torch.tensor([positions]).npu(), attention_mask=mask, use_cache=False
        ).logits[0, len(front) + len(prompt) - 1 : -1]
    return logprobs_from_logits(logits.contiguous(), torch.tensor(answer).npu()).tolist()


def gradients(model: Any, sequence: Tokens) -> dict[str, torch.Tensor]:
    model.zero_grad()
    ids = torch.tensor([sequence]).npu()
    scores = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)[0, :-1]
    scores.gather(1, ids[0, 1:, None]).sum().backward()
    return {name: parameter.grad.cpu().clone() for name, parameter in model.named_parameters()}


def main(folder: Path) -> None:
    apply_npu_patches()
    names = [each.stem.removeprefix("answer-") for each in sorted(folder.glob("answer-*.json"))]
    answers = {name: json.loads((folder / f"answer-{name}.json").read_text())["tokens"] for name in names}
    prompt = list(make_prompts(VOCABULARY, PROMPT).sample)
    models = {
        name: AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="sdpa"
        ).npu()  # fmt: skip
        for name in names
    }
    plain = {name: log_probs(model, prompt, answers[name]) for name, model in models.items()}
    expected = {name: gradients(model, [*prompt, *answers[name]]) for name, model in models.items()}
    from verl_plugin.batch_invariance import training

    for name, model in models.items():
        answer = answers[name]
        found: dict[str, Any] = {"plain": plain[name], "plain attention": log_probs(model, prompt, answer)}
        model.set_attn_implementation(training.NAME)
        found["whole"] = log_probs(model, prompt, answer)
        found["padded"] = log_probs(model, prompt, answer, padding=7)
        found["packed"] = log_probs(model, prompt, answer, packed=[5, 6, 7, 8, 9])
        obtained = gradients(model, [*prompt, *answer])
        apart = {each: (obtained[each] - of).abs().max() / of.abs().max() for each, of in expected[name].items()}
        found["gradients apart"] = float(max(apart.values()))
        found["parameters"] = len(apart)
        (folder / f"training-{name}.json").write_text(json.dumps(found))
