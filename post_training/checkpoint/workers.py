"""Runs tasks in forked processes, and counts the bytes that they handle."""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

import torch

from post_training.checkpoint.files import CheckpointError

_REFRESH_S = 0.3
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30


class ProgressBar(Protocol):
    """The methods of a tqdm bar that are used."""

    n: int

    def update(self, n: int) -> Any: ...


Task = Callable[[Any, Callable[[int], None]], Any]
"""A task takes its argument and a function that it calls with a number of bytes."""

_task: Task
_count: Any


def run_tasks(task: Task, arguments: Iterable[Any], workers: int, bar: ProgressBar) -> Generator[tuple[Any, Any]]:
    """Yield (argument, result) of every task as it ends.

    The processes are forked, so `task` may be any closure; arguments and results are pickled. The first exception of a
    task is raised here, after the tasks that were running have ended. The processes die with this one.

    Raises:
        CheckpointError: a process was killed.
    """
    global _task, _count
    context = multiprocessing.get_context("fork")
    _task, _count = task, context.Value("q", 0)
    already = bar.n
    with ProcessPoolExecutor(workers, context, _prepare_worker, (os.getpid(),)) as pool:
        running: dict[Future, Any] = {pool.submit(_run_task, argument): argument for argument in arguments}
        try:
            while running:
                done, _ = wait(running, timeout=_REFRESH_S, return_when=FIRST_COMPLETED)
                bar.update(already + _count.value - bar.n)
                for future in done:
                    yield running.pop(future), future.result()
            bar.update(already + _count.value - bar.n)
        except BrokenProcessPool as error:
            raise CheckpointError(
                "a worker process was killed, perhaps for lack of memory. Run the same command again with fewer "
                "--workers; finished files are kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_worker(parent: int) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Buffers of the same sizes are allocated repeatedly: keep freed memory, so that no pages need to be cleared again.
    libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    torch.set_num_threads(1)


def _run_task(argument: Any) -> Any:
    return _task(argument, _add)


def _add(count: int) -> None:
    with _count.get_lock():
        _count.value += count
