"""verl 0.9's own tests of checkpoint engines and log-probs, unmodified, with this project's engines loaded."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.stack_2026.upstream.vllm_ascend_ut import assemble
from tests.stack_2026.vllm_ascend.models import write_checkpoint
from tests.upstream.op_plugin import Outcome
from tests.upstream.projects import read_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

# The release before the installed 0.9.1, which has no tag.
CHECKOUT = "verl-v0.9.0"
BACKEND = Path(__file__).with_name("verl_backend.py")
ENGINES = "verl_plugin.alltoallv.engines"
ON_DIES = "tests/checkpoint_engine/test_correctness_on_npu.py"
MODEL = "models/Qwen/Qwen3-8B-Base"
WITHOUT_DIES = (
    "tests/checkpoint_engine/test_block_placement.py",
    "tests/checkpoint_engine/test_fsdp_lora_only_checkpoint_on_cpu.py",
    "tests/checkpoint_engine/test_global_steps_on_cpu.py",
    "tests/trainer/ppo/test_rollout_corr.py",
    "tests/utils/debug/test_metrics.py",
    "tests/utils/test_padding_on_cpu.py",
    "tests/workers/test_chunked_topk_log_probs_on_cpu.py",
    "tests/workers/test_engine_forward_step_detach_on_cpu.py",
    "tests/workers/test_engine_return_model_output_on_cpu.py",
)


@pytest.fixture
def place(upstream: Path, tmp_path: Path) -> Path:
    """A folder with verl's tests beside the installed package."""
    assert (upstream / CHECKOUT / "tests").is_dir(), f"{upstream} lacks {CHECKOUT}"
    return assemble(upstream / CHECKOUT, "verl", tmp_path / "place")


def ran(place: Path, names: Sequence[str], module: str) -> Outcome:
    """Run files of verl's tests in one process; verl imports `module` in it and in its workers."""
    environment = os.environ | {
        # The checkout's package `tests` must come before ours.
        "PYTHONPATH": os.pathsep.join([str(place), os.environ["PYTHONPATH"]]),
        "HOME": str(place.parent),
        "HF_HUB_OFFLINE": "1",
        "VERL_USE_EXTERNAL_MODULES": module,
        "NPU_EMULATOR_NODE": f"verl.{os.getpid()}",
        "NPU_EMULATOR_DEVICES": "8",
        "ASCEND_VISIBLE_DEVICES": ",".join(map(str, range(8))),
    }
    report = place.parent / "report.xml"
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={place}"]
    run = subprocess.run(
        [*command, f"--junitxml={report}", *names], cwd=place, env=environment, capture_output=True, text=True
    )
    return read_report("verl", report, run.stdout[-3000:] + run.stderr[-3000:])


def test_engines_and_log_probs_pass_with_the_plugin_loaded(place):
    outcome = ran(place, WITHOUT_DIES, ENGINES)
    print(f"{outcome.passed} passed, {len(outcome.skipped)} skipped")
    assert outcome.failed == {}
    assert outcome.passed >= 75


@pytest.mark.exhaustive
@pytest.mark.parametrize("spoiled", [False, True])
def test_weights_that_verls_own_test_receives_are_transformers(place, spoiled):
    """Run two training and six rollout ranks under Ray and verl's manager. A spoiled weight makes verl's test fail."""
    write_checkpoint("qwen3", place.parent / MODEL)
    shutil.copy(BACKEND, place)
    if spoiled:
        (place / "spoiled").touch()
    outcome = ran(place, (ON_DIES,), BACKEND.stem)
    assert (outcome.passed, len(outcome.failed)) == ((0, 2) if spoiled else (2, 0)), outcome.failed
    assert not spoiled or all("not equal" in words for words in outcome.failed.values())
