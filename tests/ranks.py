"""Run a test program on several ranks: one process imports it once and forks the ranks.

`run_ranks("package.module", world_size, folder)` calls that module's `main(folder)` on every rank, with RANK,
WORLD_SIZE and a fresh rendezvous in the environment. The module must not touch a device while it is imported.
"""

import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from post_training.ports import reserve_ports
from tests import forked


def run_ranks(
    program: str, world_size: int, folder: Path, timeout: float = 1500, imported: tuple[str, ...] = ()
) -> None:
    """Run `program` on all ranks; raise AssertionError with their output if one fails or time runs out.

    `imported` lists the modules that the program imports first; it is one of the tuples in `tests.forked`.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = forked.start(imported, __name__, program, world_size, folder, environment=environment, **outputs)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        raise AssertionError(f"{program} did not end within {timeout} s\n{output[-6000:]}") from None
    assert process.returncode == 0, output[-6000:]


def fork_ranks(program: str, world_size: int, folder: Path) -> int:
    """Import the program, fork one child per rank, and return the number of failed ranks."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_ports()), "WORLD_SIZE": str(world_size)}
    # Dies of the ranks' own: on those of the test process, it may hold memory of earlier tests.
    os.environ["NPU_EMULATOR_NODE"] = f"ranks-{os.getpid()}"
    module = importlib.import_module(program)
    gc.freeze()  # an engine collects garbage several times while it starts, and imports leave none
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            os._exit(run_one(module.main, folder, rank))
        children.append(child)
    failed = 0
    waiting = set(children)
    while waiting:
        ended, status = os.wait()
        if ended not in waiting:  # a library's own child process
            continue
        waiting.remove(ended)
        if status and not failed:
            # The others may wait forever for the failed rank; this process leads the session, so they end with it.
            failed = 1
            for child in children:
                try:
                    os.kill(child, 15)
                except ProcessLookupError:
                    continue
    return failed


def run_one(main: callable, folder: Path, rank: int) -> int:
    try:
        main(folder)
    except BaseException:
        print(f"rank {rank} failed:", flush=True)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    # This process leads a session, so killing the session kills the ranks.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    sys.exit(fork_ranks(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))
