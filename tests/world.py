"""A world of gloo processes on the CPU that runs one function on every rank.

The processes start once and then serve many tests. A rank that raises, dies or falls silent fails
the test by its number, and the world is replaced.
"""

import contextlib
import gc
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.multiprocessing as mp
from torch.distributed.tensor import _redistribute, debug

# A fork server that has imported the slow modules once makes a new world cheap.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor.debug", "tests.preload"]
)


class RankError(AssertionError):
    """A rank raised, died or gave no answer."""


class World:
    """``size`` processes that share one gloo group. Use as a context manager.

    A world of 1 is one process alone, without a group: the truth that the others are held to.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Call a module-level ``fn(*args)`` on every rank; return the results in rank order."""
        job = pickle.dumps((fn, args))
        for conn in self._conns:
            conn.send_bytes(job)
        return self._collect(timeout_s)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="world-")
        store = f"{self._folder.name}/store"  # a file, so no port can be taken
        pipes = [CONTEXT.Pipe() for _ in range(self.size)]
        self._conns = [ours for ours, _ in pipes]
        self._procs = [
            CONTEXT.Process(target=_serve, args=(k, self.size, store, theirs), daemon=True)
            for k, (_, theirs) in enumerate(pipes)
        ]
        for proc in self._procs:
            proc.start()
        for _, theirs in pipes:
            theirs.close()  # so that a dead rank reads as end of file
        self._collect(timeout_s=120)

    def _stop(self) -> None:
        for proc in self._procs:
            proc.kill()
        for proc in self._procs:
            proc.join()
        for conn in self._conns:
            conn.close()
        self._folder.cleanup()

    def _collect(self, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        silent = {conn: k for k, conn in enumerate(self._conns)}
        deadline = time.monotonic() + timeout_s
        while silent:
            ready = wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer from ranks {sorted(silent.values())} in {timeout_s:g} s")
            for conn in ready:
                k = silent.pop(conn)
                try:
                    raised, value = pickle.loads(conn.recv_bytes())
                except EOFError:
                    raised, value = True, "the process died"
                if raised:
                    self._fail(f"rank {k} of {self.size}: {value}")
                results[k] = value
        return [results[k] for k in range(self.size)]

    def _fail(self, message: str) -> NoReturn:
        self._stop()  # its peers may be waiting in a collective
        self._start()
        raise RankError(message)


@contextlib.contextmanager
def kept_worlds() -> Iterator[Callable[[int], World]]:
    """While open, ``world_of(size)`` is a world of that size, started when first asked for."""
    with contextlib.ExitStack() as stack:
        worlds: dict[int, World] = {}

        def world_of(size: int) -> World:
            if size not in worlds:
                worlds[size] = stack.enter_context(World(size))
            return worlds[size]

        yield world_of


def _serve(rank: int, size: int, store: str, conn: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if size > 1:
        _join(rank, size, store)
    conn.send_bytes(pickle.dumps((False, None)))
    while True:
        fn, args = pickle.loads(conn.recv_bytes())
        torch.manual_seed(1000 + rank)  # ranks that agree must do so by our doing, not by luck
        try:
            answer = (False, fn(*args))
        except BaseException:  # pytest.fail and SystemExit are failures of the rank as well
            answer = (True, traceback.format_exc())
        conn.send_bytes(pickle.dumps(answer))
        if size > 1:
            _drop_groups()


def _join(rank: int, size: int, store: str) -> None:
    # transformers reads these when it builds its mesh; trl and accelerate when they start.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size)
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def _drop_groups() -> None:
    """End the groups that a job's meshes made: each holds threads that poll, for as long as it is.

    A hundred jobs later they would take all of the processor. Models are cycles that hold theirs
    until they are collected, which takes milliseconds where what was imported is left out of it.
    """
    dist.barrier()  # a peer may still be reading from one of them
    sizes = set()
    for group in list(c10d._world.pg_map):
        if group is not dist.group.WORLD:
            sizes.add(dist.get_world_size(group))
            dist.destroy_process_group(group)
    if sizes - {1, dist.get_world_size()}:  # a mesh of several axes
        _forget_meshes()
    if sizes:
        gc.collect()


def _forget_meshes() -> None:
    """DTensor keeps what it found out of an operation, with the mesh, whose groups are gone."""
    debug._clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
