"""Tiny files where verl's Ascend quick start looks for large ones: a model's folder, and a data set like GSM8K.

The quick start reads the model in `~/models/Qwen/Qwen3-0.6B`, and its data preprocessing a downloaded copy of GSM8K.
With HOME at a folder of these files its commands run as they are published.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from post_training.data import INSTRUCTION
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import MARKER, CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.warm_start import IGNORED, negative_log_likelihood, padded_rows

MODEL = Path("models", "Qwen", "Qwen3-0.6B")
DATASET = Path("hf_data", "gsm8k")
TRAINING_PROBLEMS, TEST_PROBLEMS = 64, 8
# Stands before the number in GSM8K's answers.
_MARK = "#### "
_NAMES = ("Mia", "Tom", "Ana", "Ben")
_THINGS = ("pencils", "apples", "tickets", "books")
# Instructions that may follow a question. They mention the form itself too, so that the model copies it no matter where
# it is mentioned.
_INSTRUCTIONS = (
    INSTRUCTION,
    'Write the number after "####".',
    'Think before you answer, and put the final answer behind "####".',
    'After "####" there is the number. Think first.',
)
# As the hub's copy of GSM8K names its files, so that `datasets` finds the configuration "main".
_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


@dataclass(frozen=True)
class WordProblem:
    """A question and its answer in GSM8K's form: the working with its calculation, and the number after `####`."""

    question: str
    answer: str


def word_problems(count: int, seed: int) -> list[WordProblem]:
    """Draw problems whose answers have one digit.

    Args:
        count: how many; two may be the same.
        seed: of the draw.
    """
    generator = random.Random(seed)
    return [_word_problem(generator) for _ in range(count)]


def _word_problem(generator: random.Random) -> WordProblem:
    total = generator.randint(2, 9)
    first = generator.randint(1, total - 1)
    name, thing = generator.choice(_NAMES), generator.choice(_THINGS)
    working = f"{first}+{total - first}=<<{first}+{total - first}={total}>>{total}"
    return WordProblem(
        f"{name} has {first} {thing} and buys {total - first} more. How many {thing} does {name} have in total?",
        f"{name} has {working} {thing}.\n{_MARK}{total}",
    )


def write_dataset(folder: Path, seed: int) -> None:
    """Write the problems as a downloaded copy of GSM8K holds them."""
    from datasets import Dataset

    (folder / "main").mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    for split, count in (("train", TRAINING_PROBLEMS), ("test", TEST_PROBLEMS)):
        problems = word_problems(count, seed + (split == "test"))
        rows = [{"question": problem.question, "answer": problem.answer} for problem in problems]
        Dataset.from_list(rows).to_parquet(folder / "main" / f"{split}-00000-of-00001.parquet")


def write_model(folder: Path, seed: int, progress: Callable[[int, float], None], steps: int = 60) -> bool:
    """Write a tiny Qwen3 that answers a word problem with `#### ` and some digit, so that its rewards differ.

    Args:
        folder: of the checkpoint; it gets its name when it is whole.
        seed: of weights and answers.
        progress: called after every training step with the number of steps done and the loss.
        steps: of training.

    Returns:
        Whether it was written; False if the folder holds a tiny model, which is kept.

    Raises:
        FileExistsError: the folder exists and holds no tiny model.
    """
    if (folder / MARKER).exists():
        return False
    if folder.exists():
        raise FileExistsError(f"{folder} exists but is not a tiny model. Choose another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        untaught, taught = Path(scratch, "untaught"), Path(scratch, "taught")
        request = CheckpointRequest(DEFAULT_TRAIN_DATA, seed, warm_start=None, model_type="qwen3", published_end=True)
        make_checkpoint(request, untaught, lambda *_: None)
        model = AutoModelForCausalLM.from_pretrained(untaught, torch_dtype=torch.float32)
        _teach_form(model, AutoTokenizer.from_pretrained(untaught), seed, progress, steps)
        model.to(torch.bfloat16).save_pretrained(taught)
        (taught / "model.safetensors").rename(untaught / "model.safetensors")
        untaught.rename(folder)
    return True


def _teach_form(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    progress: Callable[[int, float], None],
    steps: int,
) -> None:
    """Train on problems whose answers are the form with a digit drawn at random."""
    generator = random.Random(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        rows, starts = [], []
        for problem in word_problems(16, generator.randrange(2**32)):
            chat = [{"role": "user", "content": f"{problem.question} {generator.choice(_INSTRUCTIONS)}"}]
            prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            response = tokenizer.encode(f"{_MARK}{generator.randint(2, 9)}", add_special_tokens=False)
            rows.append([*prompt, *response, tokenizer.eos_token_id])
            starts.append(len(prompt))
        inputs, labels = padded_rows(rows, starts, tokenizer.pad_token_id)
        loss = negative_log_likelihood(model, inputs, labels).sum() / (labels != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        progress(step + 1, loss.item())
