r"""Make the checkpoint of a tiny model, warm-started on the task's training problems.

An existing checkpoint made from the same inputs is kept, and one that another
process is making is waited for.

Example:
    python scripts/make_tiny_checkpoint.py --output outputs/tiny \
        --model-type qwen3
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from post_training.command_parser import CommandParser
from post_training.data import DataError
from rehearsal.made_once import one_at_a_time
from rehearsal.tiny_model.architecture import DEFAULT_MODEL_TYPE, TINY_MODELS
from rehearsal.tiny_model.checkpoint import DTYPES, CheckpointRequest, make_checkpoint
from rehearsal.tiny_model.tokenizer import PUBLISHED_ENDS, TURN_SEPARATORS

_PROJECT_ROOT = Path(__file__).resolve().parents[1]
_STEPS_PER_LINE = 50
_SWITCH = {"true": True, "false": False}


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--model-type",
        choices=sorted(TINY_MODELS),
        default=DEFAULT_MODEL_TYPE,
        metavar="NAME",
        help=f"{', '.join(sorted(TINY_MODELS))} (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        default=_PROJECT_ROOT / "data" / "arithmetic" / "train.jsonl",
        help="problems for the warm start (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and warm start (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="dtype of the stored weights (default: %(default)s)"
    )
    parser.add_argument(
        "--published-end", action="store_true", help="name the end token as published tokenizers of the family do"
    )
    tools = ", ".join(sorted(TURN_SEPARATORS))
    parser.add_argument("--calls-tool", action="store_true", help=f"let it call a calculator; for {tools}")
    width = "another value for a key of config.json; repeatable"
    parser.add_argument("--set", type=_change, action="append", default=[], metavar="KEY=N", dest="changes", help=width)
    parser.add_argument("--no-warm-start", action="store_true", help="leave the weights random")
    options = parser.parse_args(arguments)
    if options.calls_tool and options.model_type not in TURN_SEPARATORS:
        parser.error(
            f"--model-type={options.model_type} is invalid: --calls-tool has {', '.join(sorted(TURN_SEPARATORS))}"
        )
    return options


def _change(text: str) -> tuple[str, int]:
    key, _, value = text.partition("=")
    if key and value in _SWITCH:
        return key, _SWITCH[value]
    if not key or not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=N with a whole number N, true or false")
    return key, int(value)


def main(arguments: list[str]) -> int:
    options = _arguments(arguments)
    begun = time.monotonic()

    def show(step: int, loss: float) -> None:
        if step % _STEPS_PER_LINE == 0:
            print(f"warm start: step {step}, loss {loss:.3f}, {time.monotonic() - begun:.0f} s", flush=True)

    request = CheckpointRequest(
        options.data,
        options.seed,
        options.dtype,
        model_type=options.model_type,
        changes=tuple(options.changes),
        published_end=options.published_end and options.model_type in PUBLISHED_ENDS,
        calls_tool=options.calls_tool,
    )
    if options.no_warm_start:
        request = replace(request, warm_start=None)
    waiting = f"waiting for another process that makes {options.output}"
    try:
        with one_at_a_time(options.output, lambda: print(waiting, flush=True)):
            result = make_checkpoint(request, options.output, show)
    except (DataError, FileExistsError) as error:
        print(error, file=sys.stderr)
        return 1
    what = "kept the checkpoint of the same inputs" if result.reused else "wrote the checkpoint"
    reward = "" if result.expected_reward is None else f", expected reward {result.expected_reward:.2f}"
    print(f"{what} in {result.path}{reward}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
