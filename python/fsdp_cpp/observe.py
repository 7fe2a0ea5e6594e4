"""What the engine knows of a training: its plan, memory by category, and a timeline of all ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

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
    communication: int  # buffers of gathers and reductions, or kept for the next
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

    It records the thread that begins it. A second one in the same thread is an error.
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

    def is_recording(self) -> bool:
        """True inside of the with statement."""
        return self._recorder is not None

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
        ranks = self._of_all_ranks()
        if not dist.is_initialized() or dist.get_rank() == 0:
            _write_timelines(ranks, path)

    def _of_all_ranks(self) -> list[tuple[float, list]]:
        """When each rank began, in microseconds, and its events."""
        ranks = [(self._began_us, self._events)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            ranks = [(0.0, [])] * dist.get_world_size()
            dist.all_gather_object(ranks, (self._began_us, self._events))
        return ranks


def _write_timelines(ranks: list[tuple[float, list]], path: str | os.PathLike[str]) -> None:
    first = min((began for began, events in ranks if events), default=0.0)
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


class Run:
    """A folder about a training: losses, speed and memory of each step, the groups, a timeline, and report.html.

    with Run("runs/mine", model, batch=32, lr=3e-4) as run:
        for tokens in batches:
            ...
            run.step(loss=loss.item(), tokens=tokens.numel() * dist.get_world_size())

    All ranks use it in the same way, and rank 0 writes, with the numbers that it gives. The page is written at the
    end, also after an exception; `fsdp report runs/mine` makes it anew. Keyword arguments are shown on the page. The
    timeline has the steps in `traced`. docs/run_folder.md says what the files contain.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        *,
        device: torch.device | str | None = None,
        traced: range = range(11, 14),
        **options: Any,
    ) -> None:
        self.folder = pathlib.Path(folder)
        self._device = _device(device)
        self._groups = [
            {key: getattr(group, key) for key in ("numel", "shard_bytes", "gathered_bytes", "padding_bytes")}
            | {"name": group.module}
            for group in sharding_plan(model).groups
        ]
        self._options = {"ranks": dist.get_world_size() if dist.is_initialized() else 1} | options
        self._is_writer = not dist.is_initialized() or dist.get_rank() == 0
        self._traced = traced
        self._trace: Trace | None = None
        self._steps = self._tokens = 0
        self._began = 0.0

    def __enter__(self) -> Run:
        if self._is_writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.json").write_text(json.dumps(self._options, default=str))
            (self.folder / "groups.json").write_text(json.dumps(self._groups))
            (self.folder / "metrics.jsonl").write_text("")
        memory_stats(self._device)  # begins to count
        reset_peak_memory_stats(self._device)
        self._record_next_step()
        self._began = time.perf_counter()
        return self

    def step(
        self,
        loss: float | torch.Tensor,
        *,
        tokens: int = 0,
        lr: float | None = None,
        grad_norm: float | torch.Tensor | None = None,
    ) -> None:
        """Ends a step. `tokens` are those of the step, on all ranks."""
        # On every rank, because the whole of a DTensor is a collective.
        loss_number, norm_number = _number(loss), _number(grad_norm)
        tokens = int(tokens)
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._steps += 1
        self._tokens += tokens
        if self._is_writer:
            line = {
                "step": self._steps,
                "loss": loss_number,
                "grad_norm": norm_number,
                "lr": _number(lr),
                "tokens": self._tokens,
                "seconds": seconds,
                "tokens_per_s": tokens / seconds,
                "exposed_s": None,
                "memory": dataclasses.asdict(memory_stats(self._device)),
            }
            with open(self.folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")
        reset_peak_memory_stats(self._device)
        self._record_next_step()

    def _record_next_step(self) -> None:
        following = self._steps + 1
        if following in self._traced:
            if self._trace is None:
                self._trace = Trace(self._device)
                try:
                    self._trace.__enter__()
                except RuntimeError as error:  # a Trace of the user's own
                    warnings.warn(f"{error}: the page of this Run has no timeline of this rank", stacklevel=3)
            if self._trace.is_recording():
                self._trace.begin_step(following)
        elif self._trace is not None and following == self._traced.stop:
            self._trace.__exit__()

    def __exit__(self, error: type[BaseException] | None, *_rest: object) -> None:
        if self._trace is not None:
            self._trace.__exit__()
        self._write_report()  # also if the timelines cannot be gathered
        if error is None and self._traced:  # after an error the other ranks may not come
            ranks = (self._trace or Trace(self._device))._of_all_ranks()
            if self._is_writer and any(events for _, events in ranks):
                _write_timelines(ranks, self.folder / "trace.json")
                self._write_report()

    def _write_report(self) -> None:
        if self._is_writer and self._steps > 0:
            _C.write_report(str(self.folder))


def _number(value: float | torch.Tensor | None) -> float | None:
    """A number that JSON can hold."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return number if value is not None and math.isfinite(number := float(value)) else None
