"""Prompts, models and runs for the programs, on both stacks, that compare vLLM-Ascend's tokens with transformers'."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.ranks import fork_ranks

AnyCase = TypeVar("AnyCase")

VOCABULARY = 256
SHARED_START = list(range(20, 40))
CACHED_START = list(range(20, 155))  # more than one cache block of 128 tokens


class Case(Protocol):
    """One engine: the checkpoint that it loads, and its layout, which determines its number of ranks."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def layout(self) -> str: ...


def make_prompts(number: int, prefix_cache: bool) -> list[list[int]]:
    """Return prompts of different lengths with a common start; with a prefix cache, it is longer than a block."""
    start = CACHED_START if prefix_cache else SHARED_START
    return [[*start, 1, 3, 10 + index, 40 + 3 * index, 17, *range(4, 4 + 5 * index)] for index in range(number)]


def write_random_model(config: Any, folder: Path, seed: int = 0) -> None:
    """Write a random model, with the tokenizer that vLLM requires. No parameter is left at zero or one."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(number): number for number in range(config.vocab_size)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2", bos_token="1").save_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.05)
    model.config.torch_dtype = torch.float32
    model.save_pretrained(folder)


def pairs_of(settings: frozenset[Any]) -> set[frozenset[Any]]:
    return {frozenset(pair) for pair in combinations(settings, 2)}


def covering(cases: Sequence[AnyCase], settings_of: Callable[[AnyCase], frozenset[Any]]) -> list[AnyCase]:
    """Choose a few cases such that every pair of settings that occurs in some case occurs in a chosen one.

    Greedily takes the case that adds the most missing pairs.
    """
    pairs = [pairs_of(settings_of(case)) for case in cases]
    missing: set[frozenset[Any]] = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen


def become_data_parallel(rank: int, size: int) -> None:
    """Set vLLM's data-parallel variables, and remove those that it would mistake for tensor parallelism.

    Each rank acts as a separate machine: vLLM gives it the first die that it sees.
    """
    settings = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": size, "MASTER_IP": "127.0.0.1"}
    os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in settings.items()}
    os.environ["VLLM_DP_MASTER_PORT"] = os.environ["MASTER_PORT"]
    os.environ["NPU_EMULATOR_NODE"] += f".{rank}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def counted() -> dict[str, Any]:
    """Return the numbers of graphs captured and replayed by this process, and its calls per CANN or ATB operator."""
    from npu_emulator import meters

    snapshot = meters.snapshot()
    calls = {name: numbers["calls"] for name, numbers in snapshot["operators"].items()}
    return {what: snapshot["graphs"][what] for what in ("captured", "replayed")} | {"operators": calls}


def sleep_and_wake(llm: Any) -> int:
    """Put the engine to sleep with its weights on the host, and wake it; return the bytes that were free meanwhile."""
    import torch

    before = torch.npu.mem_get_info()[0]
    llm.sleep(level=1)
    asleep = torch.npu.mem_get_info()[0]
    llm.wake_up()
    return int(asleep - before)


def compare(
    model: Any, outputs: Sequence[Any], prompts: Sequence[list[int]], rounded: Any | None = None
) -> dict[str, float]:
    """Compare an engine's greedy tokens and log-probs with those of transformers.

    Two 16-bit computations differ from an exact one by similar amounts, and so may choose different tokens if the best
    ones are close. transformers itself, run in 16 bits, shows how large that difference is.

    Args:
        model: transformers' model, in float32.
        outputs: one output per prompt, with log-probs.
        prompts: token ids.
        rounded: the same model in the engine's 16-bit type; None if the engine computed in float32.

    Returns:
        `of`: number of tokens; `equal`: tokens that `model` would also have chosen after the same prefix; `worst`: the
        largest difference of log-probs; `rounding`: the same between the two models, over tokens with a probability of
        at least 1 %; `close`: tokens whose log-prob is at most twice that below the best.
    """
    import torch

    equal, below, worst, rounding = 0, [], 0.0, 0.0

    def log_probs(given: Any, prompt: list[int], tokens: list[int]) -> Any:
        with torch.no_grad():
            logits = given(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)

    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected, place = log_probs(model, prompt, tokens), torch.tensor(tokens)[:, None]
        chosen = expected.gather(1, place).squeeze(1)
        if rounded is not None:
            beside = log_probs(rounded, prompt, tokens)
            rounding = max(rounding, (beside - expected)[expected > math.log(0.01)].abs().max().item())
        pairs = zip(output.outputs[0].logprobs, tokens, strict=True)
        found = torch.tensor([row[token].logprob for row, token in pairs])
        equal += sum(best == token for best, token in zip(expected.argmax(-1).tolist(), tokens, strict=True))
        below += (expected.max(-1).values - chosen).tolist()
        # Treat NaN as infinitely far away, because max() may skip it.
        worst = max(worst, (chosen - found).abs().nan_to_num(nan=math.inf).max().item())
    close = sum(distance <= 2 * rounding for distance in below)
    return {"equal": equal, "close": close, "of": len(below), "worst": worst, "rounding": rounding}


def import_once(modules: Iterable[str]) -> None:
    """Import the modules that every engine needs, in vLLM's order, without touching a device.

    vLLM inspects a model's class in a separate process so that no device is touched; here it may do so in this one.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    current_platform.pre_register_and_update()
    for module in modules:
        importlib.import_module(module)
    registry._LazyRegisteredModel.inspect_model_cls = lambda lazy: registry._ModelInfo.from_model_cls(
        lazy.load_model_cls()
    )
    gc.freeze()  # an engine collects garbage several times while it starts, and imports leave none


def run_cases(
    program: str,
    folder: Path,
    cases: Sequence[Case],
    ranks: Mapping[str, int],
    write: Callable[[str, Path], None],
    merged: Callable[[list[dict[str, Any]]], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Run the cases one after another, each in ranks that are forked from this process, and print the results.

    Args:
        program: module whose `main` runs one rank of the case named by VLLM_ASCEND_CASE, and writes its results to
            ``CASE.RANK.json`` in `folder`, or an error to ``CASE.RANK.error``.
        folder: holds checkpoints and ``found.json``; cases that succeeded there are not run again.
        ranks: number of ranks by layout.
        write: writes a model's checkpoint into a folder.
        merged: combines the results of a case's ranks.

    Returns:
        Results by case name, including earlier ones in `folder`.
    """
    file = folder / "found.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    waiting = [case for case in cases if "failed" in found.get(case.name, {"failed": "never run"})]
    for model in {case.model for case in waiting}:
        write(model, folder / model)
    for case in waiting:
        os.environ |= {"VLLM_ASCEND_CASE": case.name, "NPU_EMULATOR_NODE": f"vllm_ascend.{os.getpid()}.{len(found)}"}
        failed = fork_ranks(program, ranks[case.layout], folder)
        parts = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{case.name}.*.json"))]
        reasons = sorted({path.read_text() for path in folder.glob(f"{case.name}.*.error")})
        found[case.name] = {"failed": failed, "reasons": reasons} if failed or not parts else merged(parts)
        shown = {key: value for key, value in found[case.name].items() if key != "operators"}
        print(f"{case.name:55} {shown}", flush=True)
        file.write_text(json.dumps(found))
    return found
