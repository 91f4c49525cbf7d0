"""vLLM-Ascend 0.23's own end-to-end tests for RLHF, unmodified, with a tiny model under the name that they request.

An HTTP server takes weights from a trainer through shared device memory and HCCL, and an engine sleeps and wakes up.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import npu_emulator
from rehearsal.plan import DEFAULT_TRAIN_DATA
from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint
from tests.stack_2026.upstream.vllm_ascend_ut import CHECKOUT, _has_tests, assemble
from tests.upstream.op_plugin import Outcome
from tests.upstream.projects import read_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

FOLDER = "tests/e2e/pull_request"
TESTS = (
    f"{FOLDER}/one_card/test_npu_ipc_weight_transfer.py",
    f"{FOLDER}/two_card/test_hccl_weight_transfer.py",
    f"{FOLDER}/one_card/test_camem.py",
)
MODEL = "Qwen/Qwen3-0.6B"
# Their conftest.py imports modelscope to load models, which no test here does.
MODELSCOPE = "def snapshot_download(*arguments, **named):\n    raise OSError('no hub is asked')\n"
CAPACITY_MB = 2048


@pytest.fixture(scope="module")
def place(upstream: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkout's tests beside the installed package, and the model, in which the tests run."""
    assert (upstream / CHECKOUT / "tests" / "e2e").is_dir(), f"{upstream} lacks {CHECKOUT}"
    place = assemble(upstream / CHECKOUT, "vllm_ascend", tmp_path_factory.mktemp("rlhf") / "place")
    (place / "modelscope.py").write_text(MODELSCOPE)
    asked = CheckpointRequest(DEFAULT_TRAIN_DATA, 0, warm_start=None, model_type="qwen3", published_end=True)
    make_checkpoint(asked, place / MODEL, lambda *_: None)
    return place


def ran(place: Path, name: str) -> Outcome:
    tools = Path(npu_emulator.__file__).parent / "toolkit" / "bin"
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), str(tools), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(place), *(path for path in given if path and not _has_tests(Path(path)))]),
        "HF_HUB_OFFLINE": "1",
        # As in upstream's own runs, the test process already uses an NPU when vLLM starts its engine.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "NPU_EMULATOR_NODE": f"rlhf.{os.getpid()}",
        "NPU_EMULATOR_DEVICES": "2",
        "NPU_EMULATOR_CAPACITY_MB": str(CAPACITY_MB),
        "NPU_EMULATOR_STRICT": "1",
    }
    environment.pop("TORCHDYNAMO_DISABLE", None)  # piecewise graphs require tracing the model
    report = place.parent / f"{Path(name).stem}.xml"
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={place}"]
    run = subprocess.run(
        [*command, f"--junitxml={report}", name], cwd=place, env=environment, capture_output=True, text=True
    )
    return read_report(name, report, run.stdout[-6000:] + run.stderr[-6000:])


@pytest.mark.parametrize("name", TESTS)
def test_upstreams_test_passes(place, name):
    outcome = ran(place, name)
    assert (outcome.passed, outcome.failed, outcome.skipped) == (1, {}, {}), outcome
