"""Ranks for tests: processes that stay, because starting one takes longer than most tests.

With FSDP_TEST_DEVICE=cuda they talk over NCCL, and all use the first GPU if there is only one.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import socket
import time
import traceback
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

DEVICE = os.environ.get("FSDP_TEST_DEVICE", "cpu")
TIME_LIMIT = 120  # seconds; generous, against hangs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _join(rank: int, size: int, port: int | None) -> None:
    if port is None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return
    backend = "gloo"
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"  # gloo is for parameters on the host, and for DCP
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIME_LIMIT - 20),  # so that a collective that hangs says so
    )


def _serve(rank: int, size: int, port: int | None, pipe) -> None:
    faulthandler.enable()  # a crash prints the stacks of Python, then those of C++, of all threads
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _join(rank, size, port)
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        function, args = job
        faulthandler.dump_traceback_later(TIME_LIMIT - 10)  # says where a process hangs
        try:
            torch.manual_seed(0)
            function(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        gc.collect()  # the next test does not see this one's models
    dist.destroy_process_group()


class Ranks:
    """Runs a function on every rank of a world. If it is `fake`, only rank 0 runs."""

    def __init__(self, size: int, fake: bool = False) -> None:
        self.size = size
        self.fake = fake
        self.pipes: list = []
        self.processes: list = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = None if self.fake else _free_port()
        for rank in range(1 if self.fake else self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers("start")

    def _answers(self, what: str) -> None:
        failures = []
        deadline = time.monotonic() + TIME_LIMIT
        for rank, pipe in enumerate(self.pipes):
            left = max(0, deadline - time.monotonic())
            try:
                answer = pipe.recv() if pipe.poll(left) else f"{what} takes longer than {TIME_LIMIT} s"
            except EOFError:
                self.processes[rank].join()
                answer = f"the process ended with exit code {self.processes[rank].exitcode}"
            if answer is not None:
                failures.append(f"rank {rank}: {answer}")
        if failures:
            self.stop()  # the ranks may be at different places now
            raise AssertionError("\n".join(failures))

    def run(self, function, *args) -> None:
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        self._answers(function.__name__)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []
