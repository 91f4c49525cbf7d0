"""The command-line tools as functions that run in this process."""

from pathlib import Path

from post_training.checkpoint.command_line import run_tool
from scripts import convert_ckpt_deepseek3, export_hf, fp8_cast_bf16, verify_ckpt


def cast(source: Path, output: Path, *more: str, workers: int = 2) -> int:
    paths = ["--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(output), "--workers", str(workers)]
    return run_tool(fp8_cast_bf16.parse_arguments([*paths, *more]), fp8_cast_bf16.plan)


def convert(source: Path, output: Path, *more: str, workers: int = 2) -> int:
    paths = ["--load-dir", str(source), "--save-dir", str(output), "--workers", str(workers)]
    return run_tool(convert_ckpt_deepseek3.parse_arguments([*paths, *more]), convert_ckpt_deepseek3.plan)


def export(shards: Path, model: Path, output: Path, *more: str, workers: int = 2) -> int:
    paths = ["--load-dir", str(shards), "--hf-dir", str(model), "--save-dir", str(output), "--workers", str(workers)]
    return run_tool(export_hf.parse_arguments([*paths, *more]), export_hf.plan)


def verify(left: Path, right: Path, *more: str) -> int:
    return verify_ckpt.main([str(left), str(right), "--workers", "2", *more])
