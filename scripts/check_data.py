#!/usr/bin/env python3
"""Check a parquet file for everything that verl reads in it.

Prints one line for each defect: row, column, value, what is wrong, what to do.

Example:
    python scripts/check_data.py data/gsm8k/train.parquet --tokenizer MODEL

Exit codes: 0 verl can train on the file; 1 it cannot; 2 the file or the tokenizer cannot be read.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # A tokenizer is a folder here, so no hub is asked for it.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # No device is used, so torch need not look for one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

from post_training.command_parser import CommandParser  # noqa: E402
from post_training.data import DataError  # noqa: E402
from post_training.data.images import ImageTokens, Size, prompt_lengths  # noqa: E402
from post_training.data.inspection import (  # noqa: E402
    Chat,
    Expectations,
    Inspection,
    Measure,
    inspect_file,
    too_few_rows,
)
from post_training.terminal import escape_output  # noqa: E402

SOUND, DEFECTIVE, UNREADABLE = 0, 1, 2


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the .parquet file")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the model, or of its tokenizer: prompts are measured with it. With a preprocessor_config.json "
        "prompts may have images, whose tokens count",
    )
    parser.add_argument("--image_key", default="images", metavar="NAME", help="data.image_key (default: images)")
    parser.add_argument("--max_prompt_length", type=int, default=1024, help="data.max_prompt_length (default: 1024)")
    parser.add_argument(
        "--filter_overlong_prompts",
        action="store_true",
        help="the run sets data.filter_overlong_prompts=true, so longer prompts are dropped",
    )
    parser.add_argument(
        "--train_batch_size", type=int, default=1, help="data.train_batch_size, which the rows must fill (default: 1)"
    )
    parser.add_argument("--prompt_key", default="prompt", metavar="NAME", help="data.prompt_key (default: prompt)")
    parser.add_argument(
        "--reward_fn_key", default="data_source", metavar="NAME", help="data.reward_fn_key (default: data_source)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser.parse_args(arguments)


def has_processor(folder: Path | None) -> bool:
    """Return whether a folder belongs to a model that reads images."""
    return folder is not None and (folder / "preprocessor_config.json").is_file()


def image_measure(folder: Path) -> tuple[Measure, ImageTokens]:
    """Return a function that counts tokens of chats and their images as verl does, and its settings for images.

    Raises:
        DataError: the folder has no processor of Qwen2.5-VL's kind or no chat template.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder)
        tokens = ImageTokens.of(processor.image_processor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"--tokenizer={folder} is invalid: no processor of Qwen2.5-VL. Set it to the folder of the published model."
        ) from error
    if not getattr(processor, "chat_template", None):
        raise DataError(
            f"--tokenizer={folder} is invalid: no chat template, which verl needs to build a prompt from the messages."
        )

    def count(chats: list[Chat], sizes: list[list[Size]]) -> list[int]:
        return prompt_lengths(processor, chats, sizes)

    return count, tokens


def token_counter(folder: Path) -> Measure:
    """Return a function that counts the tokens of chats without images as verl does.

    Raises:
        DataError: the folder has no tokenizer or no chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"--tokenizer={folder} is invalid: no tokenizer. Set it to the folder with tokenizer.json."
        ) from error
    if not tokenizer.chat_template:
        raise DataError(
            f"--tokenizer={folder} is invalid: no chat template, which verl needs to build a prompt from the messages."
        )

    def count(chats: list[Chat], sizes: list[list[Size]]) -> list[int]:
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        return [len(tokens) for tokens in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return count


def as_json(path: Path, inspection: Inspection) -> str:
    """Return the findings as one JSON object."""
    found = {"file": str(path), "usable": not inspection.errors, **asdict(inspection)}
    return json.dumps(found, indent=1)


def as_lines(path: Path, inspection: Inspection) -> str:
    """Return a line for each finding, errors first, and a summary in the last line."""
    ordered = sorted(inspection.findings, key=lambda finding: not finding.error)
    lines = [f"{'error' if finding.error else 'note'}: {finding.sentence()}" for finding in ordered]
    if inspection.tokens is not None:
        tokens = inspection.tokens
        lines.append(f"prompts: {tokens.shortest} to {tokens.longest} tokens, {tokens.mean:.1f} on average")
    verdict = "verl cannot train on it" if inspection.errors else "verl can train on it"
    return "\n".join([*lines, f"{path}: {inspection.rows} rows, kinds of errors: {len(inspection.errors)}; {verdict}"])


def main(arguments: list[str] | None = None) -> int:
    """Check the file and return the exit status."""
    options = parse_arguments(arguments)
    expected = Expectations(
        options.prompt_key, options.reward_fn_key, options.max_prompt_length, options.filter_overlong_prompts
    )
    try:
        if options.max_prompt_length < 1:
            raise DataError(f"--max_prompt_length={options.max_prompt_length} is invalid. Set it to at least 1.")
        if options.tokenizer and not options.tokenizer.is_dir():
            raise DataError(
                f"--tokenizer={options.tokenizer} is invalid: not a folder. Set it to the folder of the model "
                "or its tokenizer."
            )
        measure: Measure | None
        if has_processor(options.tokenizer):
            measure, tokens = image_measure(options.tokenizer)
            expected = replace(expected, image_key=options.image_key, image_tokens=tokens)
        else:
            measure = token_counter(options.tokenizer) if options.tokenizer else None
        inspection = inspect_file(options.file, expected, measure)
        if 0 < inspection.rows < options.train_batch_size:
            few = too_few_rows(inspection.rows, options.train_batch_size, "data.train_batch_size")
            inspection.findings.append(few)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return UNREADABLE
    print(as_json(options.file, inspection) if options.json else as_lines(options.file, inspection))
    return DEFECTIVE if inspection.errors else SOUND


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
