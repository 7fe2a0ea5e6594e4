"""Ranks for tests: processes that stay, because starting one takes longer than most tests."""

from __future__ import annotations

import multiprocessing
import socket
import traceback
import warnings

import torch
import torch.distributed as dist

TIME_LIMIT = 120  # seconds; generous, against hangs


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, size: int, port: int, pipe) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    pipe.send(None)
    while (job := pipe.recv()) is not None:
        function, args = job
        try:
            torch.manual_seed(0)
            function(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()


class Ranks:
    """Runs a function on every rank of a gloo world."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pipes: list = []
        self.processes: list = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self._answers("start")

    def _answers(self, what: str) -> None:
        failures = []
        for rank, pipe in enumerate(self.pipes):
            try:
                answer = pipe.recv() if pipe.poll(TIME_LIMIT) else f"{what} takes too long"
            except EOFError:
                answer = "the process died"
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
