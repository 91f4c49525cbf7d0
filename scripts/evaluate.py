#!/usr/bin/env python3
r"""Evaluate models on problems: greedy, the mean of n answers, and pass@k, with 95% confidence intervals.

Examples:
    python scripts/evaluate.py --model MODEL --data FILE --n 8
    python scripts/evaluate.py --data RUN/data/test.parquet \
        --model before=MODEL --model after=RUN/checkpoints/global_step_50

A model is a HuggingFace folder, an export, or a checkpoint of a training, which is exported first; a run's folder
stands for its newest checkpoint. vLLM-Ascend generates the answers, and the reward function of a training scores them.
Writes evaluation.json and evaluation.html, and prints the table. More in docs/evaluation.md.

Exit codes: 0 done; 1 a model could not be evaluated; 2 rejected before anything started; 130 Ctrl-C; 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":
    # Only the processes that generate use a device; a tokenizer is a folder, and no hub is asked for it.
    os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

from jinja2 import TemplateError  # noqa: E402

from post_training.arguments import absolute  # noqa: E402
from post_training.claimed_dies import DiesInUse, claimed_dies  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.data import INSTRUCTION, DataError  # noqa: E402
from post_training.end_tokens import EndTokensError, end_tokens  # noqa: E402
from post_training.evaluation.judging import RewardError, RewardFunction, judge, load_reward  # noqa: E402
from post_training.evaluation.page import render_page  # noqa: E402
from post_training.evaluation.problems import Question, read_questions  # noqa: E402
from post_training.evaluation.results import GREEDY, Answer, Answers, Evaluated, as_json, table  # noqa: E402
from post_training.masking import masked_output  # noqa: E402
from post_training.processes.command import Interrupted, SignalFlag, run_to_the_end  # noqa: E402
from post_training.processes.logs import last_error  # noqa: E402
from post_training.rewards.answers import last_boxed  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import read_object  # noqa: E402
from rehearsal.emulated_dies import remove_emulated_dies  # noqa: E402
from scripts.inference.models import (  # noqa: E402
    STACKS,
    InferenceError,
    Model,
    check_machine,
    check_stack,
    described,
    engine_environment,
    exported,
    find_model,
)

REWARD = ROOT / "verl_patches" / "utils" / "reward" / "rule_reward.py"
JSON_NAME, PAGE_NAME = "evaluation.json", "evaluation.html"
_WORKER = ROOT / "scripts" / "internal" / "generate_responses.py"
_WITH_ACCURACY = "compute_score_and_accuracy"
_SAMPLED = "sampled"
_LIMIT = 1 << 20


class EvaluationError(InferenceError):
    """The request is invalid, or a model could not be evaluated; the message is one sentence."""


@dataclass(frozen=True)
class Tokenized:
    """The questions as a model reads them, with the tokenizer and the end tokens of its answers."""

    prompts: list[list[int]]
    tokenizer: Any
    ends: list[int]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--model", action="append", required=True, metavar="[NAME=]DIR", help="repeat to compare models"
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="problems as for json_to_parquet.py, or its test.parquet",
    )
    parser.add_argument("--n", type=int, default=8, help="sampled answers per question; 0: none (default: 8)")
    parser.add_argument("--limit", type=int, default=0, help="questions to take from the start; 0: all (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default: 1024)")
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of sampled answers (default: 1.0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="top-p of sampled answers (default: 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled answers (default: 0)")
    instruction = f'ends every question (default: "{INSTRUCTION}")'
    parser.add_argument("--instruction", default=INSTRUCTION, metavar="TEXT", help=instruction)
    parser.add_argument(
        "--reward", default=str(REWARD), metavar="FILE[:NAME]", help="reward function (default: the rule reward)"
    )
    rule = "rule of the rule reward: boxed (default), gsm8k, geo3k or substring"
    parser.add_argument("--rule", default="boxed", metavar="NAME", help=rule)
    output = "folder to write (default: outputs/evaluation/TIME)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)
    stack = "versions of upstream: docs/stacks.md (default: %(default)s)"
    parser.add_argument("--stack", choices=STACKS, default="2025", metavar="NAME", help=stack)
    parser.add_argument("--emulate", action="store_true", help="run on the emulated NPU")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="dies per engine (default: 1)")
    parser.add_argument("--memory-share", type=float, default=0.8, help="share of a die's memory (default: 0.8)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate the models and return the exit code."""
    options = parse_arguments(arguments)
    try:
        _check_numbers(options)
        models = [find_model(given) for given in options.model]
        _check_names(models)
        reward, rule = _reward(options)
        questions = read_questions(options.data, options.instruction)[: options.limit or None]
        tokenized = [_tokenized(model, questions, options) for model in models]
        check_stack(options.stack)
        check_machine(options.emulate, options.tensor_parallel, options.stack)
        output = _output(options)
    except (InferenceError, DataError, RewardError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(questions)} questions, {len(models)} models; files in {output}", flush=True)
    try:
        with SignalFlag() as signals, claimed_dies(0 if options.emulate else options.tensor_parallel):
            evaluated = [
                _evaluated(model, questions, tokens, _Run(options, output, signals, reward, rule))
                for model, tokens in zip(models, tokenized, strict=True)
            ]
        _write(output, evaluated, questions, _settings(options))
    except Interrupted as interrupted:
        print(f"error: {interrupted} ended the evaluation; everything it started has been stopped", file=sys.stderr)
        return 128 + interrupted.number
    except DiesInUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (InferenceError, RewardError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(evaluated))
    print(f"answers: {output / PAGE_NAME}")
    return 0


@dataclass(frozen=True)
class _Run:
    """Settings that are common to all evaluated models."""

    options: argparse.Namespace
    output: Path
    signals: SignalFlag
    reward: RewardFunction
    rule: Mapping[str, Any]


def _check_numbers(options: argparse.Namespace) -> None:
    """Raise EvaluationError for a number out of its range."""
    wanted = (
        ("--n", options.n, 0, 1024),
        ("--limit", options.limit, 0, _LIMIT),
        ("--max-tokens", options.max_tokens, 1, _LIMIT),
        ("--seed", options.seed, 0, 2**31 - 1),
        ("--tensor-parallel", options.tensor_parallel, 1, 64),
    )
    for name, value, least, most in wanted:
        if not least <= value <= most:
            raise EvaluationError(f"{name}={value} is invalid. Set it to a number from {least} to {most}")
    if not 0 < options.temperature <= 10:
        raise EvaluationError(
            f"--temperature={options.temperature:g} is invalid. Set it above 0, up to 10; --n 0 uses only "
            "greedy answers"
        )
    for name, share in (("--top-p", options.top_p), ("--memory-share", options.memory_share)):
        if not 0 < share <= 1:
            raise EvaluationError(f"{name}={share:g} is invalid. Set it above 0, up to 1")


def _check_names(models: Sequence[Model]) -> None:
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise EvaluationError(f"two models have the name {twice}. Pass NAME=DIR for each")


def _reward(options: argparse.Namespace) -> tuple[RewardFunction, dict[str, Any]]:
    """Return the reward function, and its arguments besides the answer."""
    from post_training.rewards.rules import RULES

    if options.rule not in RULES:
        raise EvaluationError(f"--rule={options.rule} is invalid: no such rule. Set it to one of: {', '.join(RULES)}")
    file, _, name = options.reward.partition(":")
    if absolute(file) != REWARD:
        if options.rule != "boxed":
            raise EvaluationError("--rule is only for the rule reward. Remove it or --reward")
        return load_reward(options.reward), {}
    # A right answer may score less than 1: the form is a part of geo3k's score.
    name = _WITH_ACCURACY if name in ("", "compute_score") else name
    return load_reward(f"{REWARD}:{name}"), {"rule": options.rule}


def _tokenized(model: Model, questions: Sequence[Question], options: argparse.Namespace) -> Tokenized:
    """Tokenize the questions as the model reads them: in its chat template, with the beginning of the answer.

    Raises:
        EvaluationError: no tokenizer, no chat template, or prompts that are too long for the model.
    """
    folder = model.folder or described(model)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"--model={folder} is invalid: no tokenizer. Copy tokenizer.json and its settings there"
        ) from error
    if not tokenizer.chat_template:
        raise EvaluationError(
            f"--model={folder} is invalid: its tokenizer has no chat template, which builds prompts from chats"
        )
    chats = [list(question.messages) for question in questions]
    try:
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise EvaluationError(
            f"--model={folder} is invalid: its chat template rejects a prompt of the data ({error})"
        ) from error
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    try:
        ends = end_tokens(folder, tokenizer.eos_token_id)
    except EndTokensError as error:
        raise EvaluationError(f"--model {folder}: {error}") from error
    found = Tokenized(prompts, tokenizer, list(ends.tokens))
    most = read_object(folder / "config.json").get("max_position_embeddings")
    if most and found.longest + options.max_tokens > most:
        raise EvaluationError(
            f"--model={folder} reads {most} tokens, but the longest question has {found.longest} of them beside "
            f"--max-tokens {options.max_tokens}. Lower it"
        )
    return found


def _output(options: argparse.Namespace) -> Path:
    """Return the folder to write, which must not contain another evaluation."""
    folder = options.output or ROOT / "outputs" / "evaluation" / datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = absolute(folder)
    if (folder / JSON_NAME).exists():
        raise EvaluationError(f"--output={folder} is invalid: it contains an evaluation. Choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    return Path(folder)


def _evaluated(model: Model, questions: Sequence[Question], tokenized: Tokenized, run: _Run) -> Evaluated:
    """Generate and judge a model's answers."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=run.output, prefix=".work.") as scratch:
        work = Path(scratch)
        folder = model.folder or exported(model, work / "model")
        _generate(model, folder, tokenized, run, work)
        found = json.loads((work / "answers.json").read_text())
    generated = time.monotonic()
    answers = []
    for index, question in enumerate(questions):
        greedy, *rest = (
            _answer(question, tokens, why, tokenized, run)
            for tokens, why in (*found[GREEDY][index], *(found[_SAMPLED][index] if run.options.n else ()))
        )
        answers.append(Answers(greedy, tuple(rest)))
    judged = time.monotonic() - generated
    print(f"{model.name}: generated in {generated - begun:.0f} s, judged in {judged:.0f} s", flush=True)
    return Evaluated(model.name, str(model.given), answers)


def _answer(question: Question, tokens: list[int], why: str, tokenized: Tokenized, run: _Run) -> Answer:
    # Like verl's reward managers: a rule must not see the token that ends the answer.
    text = tokenized.tokenizer.decode(tokens, skip_special_tokens=True)
    score, right = judge(run.reward, question, text, run.rule)
    return Answer(text, len(tokens), why == "length", score, right, last_boxed(text) is not None)


def _generate(model: Model, folder: Path, tokenized: Tokenized, run: _Run, work: Path) -> None:
    """Run the engine in a process of its own.

    Raises:
        EvaluationError: it failed.
    """
    options, log = run.options, run.output / "logs" / f"{model.name}.log"
    length = tokenized.longest + options.max_tokens
    common = {"max_tokens": options.max_tokens, "stop_token_ids": tokenized.ends}
    sampling: dict[str, dict[str, Any]] = {GREEDY: common | {"temperature": 0.0}}
    if options.n:
        sampling[_SAMPLED] = common | {"temperature": options.temperature, "top_p": options.top_p, "n": options.n}
    engine = {
        "model": str(folder), "seed": options.seed, "dtype": "bfloat16", "max_model_len": length,
        "gpu_memory_utilization": options.memory_share, "tensor_parallel_size": options.tensor_parallel,
        # As in a training's rollout.
        "enforce_eager": True,
    }  # fmt: skip
    (work / "request.json").write_text(
        json.dumps({"engine": engine, "prompts": tokenized.prompts, "sampling": sampling})
    )
    node = f"evaluate.{os.getpid()}"
    environment = engine_environment(folder, options.emulate, options.tensor_parallel, node, options.stack)
    command = [sys.executable, str(_WORKER), str(work / "request.json"), str(work / "answers.json")]
    try:
        status = run_to_the_end(command, environment, ROOT, log, run.signals)
    finally:
        if options.emulate:
            remove_emulated_dies(node)
    if status or not (work / "answers.json").is_file():
        raise EvaluationError(f"{model.name} could not generate: {last_error(log)} ({log})")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings on which the results depend, for readers of the table."""
    reward = options.rule if options.reward == str(REWARD) else options.reward
    sampled = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed} if options.n else {}
    return {"data": str(options.data), "n": options.n, **sampled, "max_tokens": options.max_tokens, "reward": reward,
            "emulated": options.emulate}  # fmt: skip


def _write(output: Path, models: Sequence[Evaluated], questions: Sequence[Question], settings: dict[str, Any]) -> None:
    """Write the page, and last the JSON, which marks the evaluation as done; each is renamed when it is complete."""
    content = json.dumps(as_json(models, questions, settings), indent=1, ensure_ascii=False)
    for name, text in ((PAGE_NAME, render_page(models, questions, settings)), (JSON_NAME, content + "\n")):
        unfinished = output / f".{name}.{os.getpid()}"
        # Half of a surrogate pair cannot be encoded.
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.replace(output / name)


if __name__ == "__main__":
    escape_output()
    with masked_output():
        sys.exit(main())
