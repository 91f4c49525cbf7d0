"""vLLM-Ascend 0.23's own unit tests, unmodified, on emulated dies.

    python -m tests.stack_2026.upstream.vllm_ascend_ut --upstream FOLDER [--file PART ...] [--limit SECONDS]
        [--keep FOLDER]

FOLDER holds the checkout `vllm-ascend-v0.23.0`. Upstream's CI runs the folders
`a2`, `a2_2`, `a3_2` and `a3_4` on NPUs, and the others without one, with mocks
in place of torch_npu. Here all of them run with the real torch_npu on emulated
dies. Tests for the Atlas 300I (310P) are left out: the published package is for
A2. Prints the share that passed, and the reason of each failure, which
`vllm_ascend.toml` lists.
"""

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import npu_emulator
from tests.post_training.models.published_configs import PUBLISHED_CONFIGS
from tests.stack_2026.upstream.forked_pytest import name_of
from tests.upstream.op_plugin import Outcome, share
from tests.upstream.projects import read_report

CHECKOUT = "vllm-ascend-v0.23.0"
PROGRAM = Path(__file__).with_name("forked_pytest.py")
TABLE = Path(__file__).with_name("vllm_ascend.toml")
ON_NPUS = ("/a2/", "/a2_2/", "/a3_2/", "/a3_4/")
LEFT_OUT = ("/_310p/", "/310p/")
DIES, CAPACITY_MB = 4, 32 << 10
LIMIT_S = 600
_LITE = PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V2-Lite-Chat"]
# Models whose config.json the tests read from a hub. They have no weights here.
CONFIGS = {
    "Qwen/Qwen3-8B": PUBLISHED_CONFIGS["Qwen/Qwen3-8B"],
    "deepseek-ai/DeepSeek-V3.2-Exp": PUBLISHED_CONFIGS["deepseek-ai/DeepSeek-V3.2-Exp"],
    "deepseek-ai/DeepSeek-V2": _LITE
    | {"hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128, "num_key_value_heads": 128}
    | {"q_lora_rank": 1536, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160}
    | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
}


def files(upstream: Path, parts: Iterable[str] = ()) -> list[str]:
    """Return the checkout's unit-test files by path in it: those whose path contains one of `parts`, or all."""
    root, wanted = upstream / CHECKOUT, list(parts)
    found = [f"/{path.relative_to(root)}" for path in sorted(root.glob("tests/ut/**/test_*.py"))]
    found = [path for path in found if not any(part in path for part in LEFT_OUT)]
    return [path[1:] for path in found if not wanted or any(part in path for part in wanted)]


def assemble(checkout: Path, package: str, place: Path) -> Path:
    """Copy the checkout's tests to `place`, and link its other files and the installed package there.

    Tests may write files, and they import the package from their own folder, where the checkout's is not the one under
    test.
    """
    place.mkdir(parents=True)
    for path in checkout.iterdir():
        if path.name == "tests":
            shutil.copytree(path, place / path.name)
        elif path.name != package:
            (place / path.name).symlink_to(path)
    (place / package).symlink_to(Path(importlib.util.find_spec(package).origin).parent)
    return place


def write_hub(folder: Path) -> Path:
    """Write a cache of the Hugging Face hub with the configurations of `CONFIGS`."""
    for name, config in CONFIGS.items():
        model = folder / f"models--{name.replace('/', '--')}"
        for path, text in (("refs/main", "published"), ("snapshots/published/config.json", json.dumps(config))):
            (model / path).parent.mkdir(parents=True, exist_ok=True)
            (model / path).write_text(text)
    return folder


def run(upstream: Path, names: Sequence[str], limit: float = LIMIT_S, keep: Path | None = None) -> list[Outcome]:
    """Run unit-test files, each in its own process for at most `limit` seconds.

    `keep` is a folder for pytest's reports; files that already have a report there are skipped.
    """
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch)
        place, results = assemble(upstream / CHECKOUT, "vllm_ascend", own / "place"), keep or own / "results"
        results.mkdir(parents=True, exist_ok=True)
        tools = Path(npu_emulator.__file__).parent / "toolkit" / "bin"
        environment = os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(tools), os.environ["PATH"]]),
            "HF_HUB_CACHE": str(write_hub(own / "hub")),
            "HF_HUB_OFFLINE": "1",
            "NPU_EMULATOR_DEVICES": str(DIES),
            "NPU_EMULATOR_CAPACITY_MB": str(CAPACITY_MB),
            "NPU_EMULATOR_STRICT": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # `tests` must resolve to the checkout's package.
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in given if path and not _has_tests(Path(path)))
        reports = {name: results / f"{name_of(place / name, place)}" for name in names}
        waiting = [place / name for name in names if not Path(f"{reports[name]}.xml").exists()]
        command = [sys.executable, "-W", "ignore", PROGRAM, results, "1", str(limit), place, *waiting]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [_outcome(name, reports[name]) for name in names]


def _has_tests(folder: Path) -> bool:
    return (folder / "tests" / "__init__.py").exists() or (folder / "tests" / "conftest.py").exists()


def _outcome(name: str, report: Path) -> Outcome:
    written = Path(f"{report}.log").read_text(errors="replace") if Path(f"{report}.log").exists() else ""
    return read_report(name, Path(f"{report}.xml"), " ".join(written[-600:].split()))


def reasons() -> list[dict[str, str]]:
    """Read the table of failures. Each entry has `test`, a pattern of "file name", `kind` and `reason`."""
    return tomllib.loads(TABLE.read_text())["failure"]


def reason_of(test: str, table: Iterable[dict[str, str]]) -> dict[str, str] | None:
    """Return the first entry of the table that matches a test, given as "file name"."""
    return next((entry for entry in table if fnmatch.fnmatchcase(test, entry["test"])), None)


def failures(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the failure text of each failed test, by "file name"."""
    return {
        f"{outcome.file} {name.rpartition('::')[2]}": words
        for outcome in outcomes
        for name, words in outcome.failed.items()
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--file", nargs="*", default=(), metavar="PART", help="only files with this in their path")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="for one file")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep reports, and go on where a run stopped")
    options = parser.parse_args()
    names = files(options.upstream, options.file)
    if not names:
        parser.error(f"{options.upstream / CHECKOUT} holds no such files of tests")
    outcomes = run(options.upstream.resolve(), names, options.limit, options.keep)
    for outcome in outcomes:
        counts = f"{outcome.passed} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
        print(f"{outcome.file:75} {counts}")
    passed, ran = share(outcomes)
    print(f"{passed} of {ran} tests that ran passed ({passed / max(ran, 1):.1%}), in {len(outcomes)} files")
    table, counted = reasons(), Counter()
    for test in failures(outcomes):
        entry = reason_of(test, table)
        counted[f"{entry['kind']}: {entry['reason']}" if entry else f"not looked into: {test}"] += 1
    for why, number in sorted(counted.items()):
        print(f"{number:5} {why}")


if __name__ == "__main__":
    main()
