"""What the engine knows of a training: its plan, memory by category, and a timeline of all ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import _C, _mesh
from ._state import state_of


def sharding_plan(module: nn.Module) -> _C.ShardingPlan:
    """What the sharded modules at and below `module` will take. `module` is the one whose forward you call.

    That is the memory of the parameters, and what a step of one forward and one backward sends. `print(plan)` shows
    a table, and `plan.groups` has its numbers. It runs no step and needs no memory: `module` may be on the meta device.
    """
    named = ((name, state_of(each)) for name, each in module.named_modules())
    sharded = [(name, state.engine) for name, state in named if state is not None]
    if not sharded:
        raise ValueError(f"nothing in this {type(module).__name__} is sharded; call fully_shard first")
    return _C.sharding_plan(sharded)


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Bytes on one device that belong to this rank."""

    shards: int  # of the parameters
    gathered: int  # parameters that are whole at the moment
    gradients: int  # of shards and of whole parameters
    communication: int  # buffers of gathers and reductions in flight
    other: int  # all else: activations, optimizer state, your own tensors
    allocated: int  # the sum of the above, if all of it was counted
    peak: int  # the highest `allocated` since reset_peak_memory_stats


def _device(device: torch.device | str | None) -> torch.device:
    device = torch.device(device or _mesh.default_device_type())
    return device if device.index is not None else _mesh.device_of(device.type)


def memory_stats(device: torch.device | str | None = None) -> MemoryStats:
    """What is allocated now. On the CPU, counting begins with the first call."""
    return MemoryStats(**_C.memory_stats(_device(device)))


def reset_peak_memory_stats(device: torch.device | str | None = None) -> None:
    """Sets the peak to what is allocated now."""
    _C.reset_peak_memory_stats(_device(device))


class Trace:
    """A timeline of forward, backward, collectives, waiting and memory, for Perfetto and chrome://tracing.

    with Trace() as trace:
        for step in range(10):
            trace.begin_step(step)
            ...
    trace.write("trace.json")

    It records the thread that begins it. A thread has one at a time.
    """

    def __init__(self, device: torch.device | str | None = None, memory: bool = True) -> None:
        self._arguments = (_device(device), memory)
        self._recorder: _C.Trace | None = None
        self._events: list[dict[str, Any]] = []
        self._began_us = 0.0
        self.waited_s = 0.0  # how many seconds this rank has waited for collectives

    def __enter__(self) -> Trace:
        self._began_us = time.time_ns() / 1e3
        self._recorder = _C.Trace(*self._arguments)
        return self

    def begin_step(self, step: int) -> None:
        """A step lasts until the next one begins, or until recording ends."""
        if self._recorder is None:
            raise RuntimeError("a Trace records inside of its with statement only")
        self._recorder.begin_step(step)

    def __exit__(self, *_error: object) -> None:
        if self._recorder is not None:
            self.waited_s = self._recorder.waited_s()
            self._events = json.loads(self._recorder.json())["traceEvents"]
            self._recorder = None

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the timelines of all ranks into one file, on rank 0. All ranks must call it."""
        ranks = [(self._began_us, self._events)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [(0.0, [])] * dist.get_world_size()
            dist.all_gather_object(ranks, (self._began_us, self._events))
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        first = min(began for began, _ in ranks)
        merged = []
        for rank, (began, events) in enumerate(ranks):
            for event in events:
                event["pid"] = rank
                if "ts" in event:
                    event["ts"] += began - first
                if event.get("name") == "process_name":
                    event["args"] = {"name": f"rank {rank}"}
            merged += events
        with open(path, "w") as file:
            json.dump({"traceEvents": merged}, file)
