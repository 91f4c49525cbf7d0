"""Order and selection of the tests, their own emulated dies, and fixtures for a tiny model and a lone rank."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from post_training.ports import reserve_ports
from tests import configurations, forked, stack_2026
from tests.fast_tier import Measurement, Selection, Unmeasured, file_of, folder_of
from tests.sharing import FileScheduling

# Processes of a node share the memory of its dies. Use a separate node, so that no other run on this machine joins.
os.environ["NPU_EMULATOR_NODE"] = f"tests-{os.getpid()}"
# As in the rehearsal, operators reject what their documentation forbids, and collectives complete only at wait(). Most
# comparisons use float32, which kernels for 16 bits only accept in these reference runs.
MODES = {"NPU_EMULATOR_STRICT": "float32", "NPU_EMULATOR_DEFERRED_COLLECTIVES": "1"}
os.environ |= MODES
# A test that changes one of these without restoring it breaks every later test that starts a job.
OF_EVERY_JOB = {
    name: os.environ.get(name) for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "VLLM_PLUGINS", "PYTHONOPTIMIZE")
}

# An example's duration depends on the load of the machine and says nothing about the tested code.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")
configurations.read_once()

EMULATOR = Path(__file__).parent / "npu_emulator"
ROOT = Path(__file__).parents[1]
# If several processes share the tests, each file's tests stay together, and in TOGETHER a whole folder's, since its
# tests share processes. FIRST has the longest folders, which start early, slow files first, so that all end together.
TOGETHER = ("tests/worker_processes",)
FIRST = ("tests/npu_emulator", *TOGETHER, "tests/verl_patches/trainer", "tests/scripts", "tests/rehearsal")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the tests that take many minutes too")
    parser.addoption("--fast", action="store_true", help="run the fast tier of tests/fast_tier.py")
    parser.addoption("--measure", action="store_true", help="write what the tests cost to tests/durations.json")
    parser.addoption("--measure-new", action="store_true", help="the same, of files alone that are not in there")
    parser.addoption(
        "--upstream", type=Path, metavar="FOLDER", help="folder with checkouts of upstream projects, for tests/upstream"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        config.pluginmanager.register(Selection())
    if config.getoption("measure_new"):
        config.pluginmanager.register(Unmeasured())
    if config.getoption("measure") or config.getoption("measure_new"):
        config.pluginmanager.register(Measurement())
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        forked.share_templates(without=tuple(MODES))
        if stack_2026.IS_INSTALLED:
            from tests.stack_2026.shared_training import share_templates
        else:
            from tests.shared_training import share_templates
        share_templates()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    scheduler = FileScheduling(config, log)
    scheduler.together = TOGETHER
    return scheduler


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while collecting tests, and freeze what was imported.

    None of it becomes garbage; searching it took a fifth of the collection's time, and then a twentieth of the tests'.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the emulator's own tests first: others import Megatron, which redirects torch.cuda to the NPU.

    No test file may do so at import time, since all files are imported before the first test runs.
    """
    if "torch_npu.contrib.transfer_to_npu" in sys.modules:
        raise pytest.UsageError(
            "a file of tests hands torch.cuda over to the NPU when it is imported, which spoils the emulator's own "
            "tests: import Megatron, verl and programs that do inside a test, or run them in a process of their own"
        )
    if hasattr(config, "workerinput"):
        slow = {file_of(item) for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (folder_of(file_of(item)) or "", file_of(item) not in slow))
    folders = [ROOT / folder for folder in FIRST]
    items.sort(key=lambda item: [not item.path.is_relative_to(folder) for folder in folders])
    if not config.getoption("exhaustive"):
        skipped = pytest.mark.skip(reason="takes many minutes; --exhaustive runs it")
        for item in items:
            if item.get_closest_marker("exhaustive"):
                item.add_marker(skipped)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail if an earlier test removed the stricter modes; the emulator's own tests start without them."""
    if not item.path.is_relative_to(EMULATOR):
        changed = {name: os.environ.get(name) for name, value in MODES.items() if os.environ.get(name) != value}
        assert not changed, f"an earlier test left {changed} in the environment; all tests share {MODES}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that leaves an environment in which no job starts, instead of later tests that start one."""
    from post_training.inherited_environment import EnvironmentRejected, check_inherited

    yield
    try:
        check_inherited(os.environ)
    except EnvironmentRejected as error:
        for name, value in OF_EVERY_JOB.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        pytest.fail(f"{item.nodeid} leaves an environment in which no job starts: {error}", pytrace=False)


def make_inputs(folder: Path, **changes: int) -> tuple[Path, Path]:
    """Write a tiny float32 checkpoint with random weights, and the bundled training data as parquet, to `folder`."""
    from rehearsal.tiny_model.checkpoint import CheckpointRequest, make_checkpoint

    problems = ROOT / "data" / "arithmetic" / "train.jsonl"
    request = CheckpointRequest(problems, 0, "float32", warm_start=None, changes=tuple(changes.items()))
    checkpoint = make_checkpoint(request, folder / "checkpoint", lambda step, loss: None).path
    convert = [sys.executable, ROOT / "scripts" / "json_to_parquet.py", "--output_dir", folder, "--json_path", problems]
    subprocess.run(convert, check=True, capture_output=True)
    return checkpoint, folder / "train.parquet"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> tuple[Path, Path]:
    """A tiny checkpoint, and training data."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def mla_inputs(tmp_path_factory) -> tuple[Path, Path]:
    """The same inputs with the widths of DeepSeek-V3's attention.

    Its kernels in graphs accept no other widths, on a device and here in strict mode.
    """
    from rehearsal.resume_proof.model import KERNEL_WIDTHS

    return make_inputs(tmp_path_factory.mktemp("mla_inputs"), **KERNEL_WIDTHS)


@pytest.fixture(scope="session")
def upstream(pytestconfig: pytest.Config) -> Path:
    """The folder with upstream checkouts; without it, tests that need it are skipped."""
    folder = pytestconfig.getoption("--upstream")
    if folder is None:
        pytest.skip("NOT RUN: needs checkouts of upstream projects; give their folder with --upstream FOLDER")
    return folder.resolve()


@pytest.fixture(scope="session")
def lone_rank():
    """Default process group on hccl, with this process as its only rank."""
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401

    torch.npu.set_device(0)
    dist.init_process_group("hccl", init_method=f"tcp://127.0.0.1:{reserve_ports()}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def own_context(monkeypatch):
    """A separate process context for the test."""
    from post_training import process_context

    own = process_context.ProcessContext()
    monkeypatch.setattr(process_context, "_context", own)
    return own
