#!/usr/bin/env python3
"""Export a training checkpoint, or Megatron shards, to a HuggingFace folder.

Examples:
    python scripts/export_hf.py RUN/checkpoints/global_step_50 OUT
    python scripts/export_hf.py --load-dir SHARDS --hf-dir MODEL --save-dir OUT

A training checkpoint, of either stack, needs no layout options: its weights are rounded once to the `torch_dtype` of
MODEL's config.json, and MODEL defaults to the run's own. The manifest.json of convert_ckpt_deepseek3.py has the layout
of its shards; for other shards, pass it. Run the same command again to resume an interrupted export. More in
docs/checkpoints.md and docs/weights.md.

Exit codes: 0 done; 2 rejected; 130 Ctrl-C.
"""

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    # No tensor of these tools touches a device, so torch need not load one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


from post_training.arguments import absolute  # noqa: E402
from post_training.checkpoint.command_line import add_common_options, known_checksums, run_tool  # noqa: E402
from post_training.checkpoint.conversion import Conversion  # noqa: E402
from post_training.checkpoint.huggingface import CONFIG_NAME  # noqa: E402
from post_training.checkpoint.layout_options import add_layout_options, layout_form  # noqa: E402
from post_training.checkpoint.shard_conversion import shards_form, to_huggingface  # noqa: E402
from post_training.checkpoint.trained_weights import described_model, is_training_checkpoint, model_folder  # noqa: E402
from post_training.checkpoint.training_export import trained_to_huggingface  # noqa: E402
from post_training.command_parser import CommandParser  # noqa: E402
from post_training.report.run_folder import CONFIGURATION, at  # noqa: E402
from post_training.terminal import escape_output  # noqa: E402
from post_training.user_files import read_yaml  # noqa: E402

_GB = 10**9
# In a run's folder; the second is Hydra's own, of a launcher of the stack 2026.
_CONFIGURATIONS = (CONFIGURATION, "hydra/.hydra/config.yaml")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT", help="alias of --load-dir")
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="alias of --save-dir")
    parser.add_argument("--load-dir", type=Path, metavar="DIR", help="folder of the shards or of the checkpoint")
    parser.add_argument("--save-dir", type=Path, metavar="DIR", help="folder to write; empty or new")
    parser.add_argument(
        "--hf-dir",
        type=Path,
        metavar="DIR",
        help="folder with config.json and tokenizer; its weights are not read. For shards with a manifest, its "
        "config.json must be theirs (default: the model that the run of the checkpoint names in its config.yaml)",
    )
    parser.add_argument("--max-file-gb", type=float, default=5.0, help="largest safetensors file in GB (default: 5)")
    add_layout_options(parser, "source")
    add_common_options(parser)
    options = parser.parse_args(arguments)
    for name, place in (("load_dir", "checkpoint"), ("save_dir", "out")):
        given = [folder for folder in (getattr(options, name), getattr(options, place)) if folder is not None]
        if len(given) != 1:
            parser.error(f"pass {place.upper()} (or --{name.replace('_', '-')}) once")
        setattr(options, name, given[0])
    return options


def plan(options: argparse.Namespace) -> Conversion:
    """Return the conversion that the options ask for."""
    if not math.isfinite(options.max_file_gb) or options.max_file_gb * _GB < 1:
        raise ValueError(f"--max-file-gb={options.max_file_gb:g} is invalid. Set it to a size above 0")
    size, checksums = int(options.max_file_gb * _GB), known_checksums(options)
    if is_training_checkpoint(options.load_dir):
        model_folder(options.load_dir)  # a half-written checkpoint is rejected first
        model = options.hf_dir or model_of_run(options.load_dir)
        return trained_to_huggingface(options.load_dir, model, options.save_dir, size, checksums)
    if options.hf_dir is None:
        raise ValueError("--hf-dir is missing. Set it to the folder with the model's config.json and tokenizer")
    form, config = shards_form(options.load_dir, lambda shape: layout_form(options, "source", shape), options.hf_dir)
    return to_huggingface(options.load_dir, options.hf_dir, options.save_dir, form, config, size, checksums)


def model_of_run(checkpoint: Path) -> Path:
    """Return the folder of the model that a run trained, for a checkpoint in the run's folder.

    A checkpoint of verl's own managers has the model's config.json and tokenizer too. They are taken where the run's
    folder names no model that is here.
    """
    described = described_model(checkpoint)
    places = (folder / name for folder in absolute(checkpoint).parents[:3] for name in _CONFIGURATIONS)
    configuration = next((place for place in places if place.is_file()), None)
    path = at(read_yaml(configuration), "actor_rollout_ref.model.path") if configuration else None
    if isinstance(path, str) and (described is None or (Path(path) / CONFIG_NAME).is_file()):
        return Path(path)
    if described is not None:
        return described
    if configuration is not None:
        raise ValueError(f"{configuration} does not name a model. Set --hf-dir to the model's folder")
    raise ValueError(
        f"{checkpoint} is not in the folder of a run with a config.yaml. Set --hf-dir to the model's folder"
    )


if __name__ == "__main__":
    escape_output()
    sys.exit(run_tool(parse_arguments(), plan))
