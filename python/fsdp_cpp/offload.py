"""Parameters in host memory: which ones, and how their updates keep up with the device."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.optim import LBFGS, Optimizer

from . import _C
from ._muon import Muon
from ._placements import local_of

__all__ = ["CPUOffloadPolicy", "DeviceBudget", "StepInBackward"]


class DeviceBudget:
    """How much memory of a device the shards of a model may take, with their gradients and optimizer states.

    `states` is how many states of a parameter's size the optimizer keeps: two for AdamW.
    """

    def __init__(self, size: int, states: int = 2) -> None:
        if size < 0 or states < 0:
            raise ValueError(f"[DeviceBudget] {size} bytes and {states} optimizer states: neither may be negative")
        self.size = size
        self.states = states
        self._taken: dict[int, int] = {}  # by rank, because ranks that are threads may share a budget
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Takes that many bytes. Returns False, and takes nothing, if fewer are left."""
        with self._lock:
            taken = self._taken.get(dist.get_rank(), 0) + size
            if taken > self.size:
                return False
            self._taken[dist.get_rank()] = taken
            return True

    def left(self) -> int:
        """The bytes that are left to this rank."""
        with self._lock:
            return self.size - self._taken.get(dist.get_rank(), 0)


@dataclass
class CPUOffloadPolicy(torch_fsdp.CPUOffloadPolicy):
    """torch's policy, with a budget. Give one policy to all calls for a model, the first layers first.

    What a call of fully_shard manages stays on the device as long as it fits into the budget. Without a budget,
    everything is offloaded.
    """

    budget: DeviceBudget | None = None


BeforeUpdate = Callable[[list[nn.Parameter]], None]


class StepInBackward:
    """Updates the parameters of each group while backward goes on to the next one.

    It is for offloaded parameters: the host updates them, which takes long, while the device computes. A gradient is
    freed right after its update.

        optimizer = fsdp_cpp.optim.AdamW(model.parameters())
        updates = StepInBackward(model, optimizer)
        ...
        loss.backward()
        updates.finish()  # instead of optimizer.step() and optimizer.zero_grad()

    A thread updates the parameters that are in host memory, and `finish` those on an accelerator. The results are those
    of `optimizer.step()` after backward. Every backward is a step, except those after `set_is_last_backward(False)` or
    `set_requires_gradient_sync(False)`. Between backward and `finish`, nobody else may use the optimizer, the
    parameters or their gradients. What needs all gradients before the first update cannot be combined with this:
    clipping by the norm of all gradients, GradScaler, Muon, optimizers with a closure.

    If backward or `finish` raises, some parameters are updated and others are not. Call `discard`, then load a
    checkpoint.

    Args:
        module: The root of the sharded modules.
        optimizer: Has all its parameters already.
        before_update: Is called before each update with its parameters: those of one group by the thread, all others
            together by `finish`. It may look at their gradients and change them. It must not communicate, because
            backward does so at the same time.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, before_update: BeforeUpdate | None = None) -> None:
        if isinstance(optimizer, (Muon, LBFGS, getattr(torch.optim, "Muon", Muon))):
            raise ValueError(
                f"[StepInBackward] {type(optimizer).__name__} cannot step on some parameters alone; call its step() "
                "after backward"
            )
        self._optimizer = optimizer
        self._before_update = before_update
        self._names: dict[torch.Tensor, str] = {param: name for name, param in module.named_parameters()}
        self._params = [group["params"] for group in optimizer.param_groups]
        self._in_optimizer = {param for params in self._params for param in params}
        self._updated: set[torch.Tensor] = set()  # since the last `finish`
        self._in_use: list[_C.ReducedGrads] = []  # until `finish`, so that no forward begins
        self._error: BaseException | None = None
        self._discards = False
        self._stepping_thread: int | None = None
        self._thread = _Thread()
        # Neither the module nor the optimizer keeps this object alive.
        add, check_step = weakref.WeakMethod(self._add), weakref.WeakMethod(self._check_step)
        hooked: Any = module
        hooked.set_reduced_grads_hook(lambda grads: _call(add, grads))
        step_hook = optimizer.register_step_pre_hook(lambda *_: _call(check_step))
        self._end = weakref.finalize(self, _end, self._thread, weakref.ref(module), step_hook)
        _all.add(self)

    def finish(self) -> None:
        """Waits until all parameters that have a gradient are updated, and clears their gradients.

        Call it after each backward that is a step. If an update failed, raises its error.
        """
        updated = self._wait()
        error, self._error = self._error, None
        if error is not None:
            self._optimizer.zero_grad()
            raise error
        self._check_same_parameters()
        left = [param for params in self._params for param in params if param.grad is not None]
        for param in left:
            if param in updated:
                self._refuse(param)
        if left:
            self._step(left)

    def discard(self) -> None:
        """Leaves out the updates that have not begun, and clears all gradients. Call it after an error."""
        self._discards = True
        self._wait()
        self._discards = False
        self._error = None
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Ends the thread. From now on, the optimizer steps as usual."""
        self._end()
        if self._error is not None:
            warnings.warn(f"[StepInBackward] an update failed: {self._error}", stacklevel=2)
        elif self._in_use:
            warnings.warn(
                "[StepInBackward] finish() was not called after the last backward; parameters that are not in host "
                "memory were not updated",
                stacklevel=2,
            )
        self._release()

    def __enter__(self) -> StepInBackward:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def _wait(self) -> set[torch.Tensor]:
        """Waits for the thread. Returns the parameters that it has updated."""
        self._thread.wait()
        self._release()
        updated, self._updated = self._updated, set()
        return updated

    def _release(self) -> None:
        for grads in self._in_use:
            grads.release()
        self._in_use.clear()

    def _add(self, grads: _C.ReducedGrads) -> None:
        """Called in backward. Those of the parameters that are on the host are updated soon."""
        self._in_use.append(grads)
        params = [param for param in grads.params if param in self._in_optimizer and local_of(param).is_cpu]
        for param in params:
            if param in self._updated:
                self._refuse(param)
            self._updated.add(param)
        if params:
            self._thread.call(functools.partial(self._update, params, grads))

    def _update(self, params: list, grads: _C.ReducedGrads) -> None:
        """Called by the thread. After an error, the rest of the step is left out."""
        try:
            grads.wait()
            if self._error is None and not self._discards:
                self._step(params)
        except BaseException as error:
            self._error = error

    def _step(self, params: list) -> None:
        if self._before_update is not None:
            with torch.no_grad():
                self._before_update(params)
        self._check_same_parameters()
        with self._only(params):
            self._optimizer.step()
        for param in params:
            param.grad = None

    @contextlib.contextmanager
    def _only(self, params: list) -> Iterator[None]:
        """Inside of it, the optimizer has these parameters only.

        They keep their places in the parameter groups, which decide how LowPrecisionAdamW rounds them. In the other
        places is a tensor without gradient.
        """
        some, nothing = set(params), torch.empty(0)
        for group in self._optimizer.param_groups:
            group["params"] = [param if param in some else nothing for param in group["params"]]
        self._stepping_thread = threading.get_ident()
        try:
            yield
        finally:
            self._stepping_thread = None
            for group, every in zip(self._optimizer.param_groups, self._params, strict=True):
                group["params"] = every

    def _check_step(self) -> None:
        """Called before each step of the optimizer."""
        if self._in_use and self._stepping_thread != threading.get_ident():
            raise RuntimeError("[StepInBackward] call its finish() after backward, not the optimizer's step()")

    def _check_same_parameters(self) -> None:
        if [len(group["params"]) for group in self._optimizer.param_groups] != [len(every) for every in self._params]:
            raise ValueError(
                "[StepInBackward] the optimizer has other parameters than before; make a StepInBackward after its "
                "parameter groups are complete"
            )

    def _refuse(self, param: torch.Tensor) -> None:
        raise RuntimeError(
            f"[StepInBackward] parameter '{self._names.get(param, '?')}' got another gradient after it was updated. "
            "Call finish() after each backward, and set_is_last_backward(False) before each backward but the last one "
            "of a step. If its weight is used outside of its own module, too, put both modules in one fully_shard, or "
            "step after backward"
        )


_all: weakref.WeakSet[StepInBackward] = weakref.WeakSet()


def check_updated(api: str, params: list[torch.Tensor]) -> None:
    """Raises if a StepInBackward may be updating these parameters."""
    for updates in list(_all):
        if updates._in_use and not updates._in_optimizer.isdisjoint(params):
            raise RuntimeError(
                f"[{api}] the parameters are still being updated by the StepInBackward, which cannot be combined with "
                "it; call its finish() after each backward"
            )


class _Thread:
    """Calls functions, one after the other. Knows its owner only as long as it has something to do for it."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="StepInBackward", daemon=True)
            self._thread.start()
        self._waiting.put(function)

    def wait(self) -> None:
        self._waiting.join()

    def end(self) -> None:
        """Does what is waiting, then ends."""
        if self._thread is not None:
            self._waiting.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (function := self._waiting.get()) is not None:
            function()
            del function  # the next one may be long in coming
            self._waiting.task_done()
        self._waiting.task_done()


def _call(method: weakref.WeakMethod, *args: Any) -> None:
    if (alive := method()) is not None:
        alive(*args)


def _end(thread: _Thread, module: weakref.ref, step_hook: Any) -> None:
    thread.end()
    step_hook.remove()
    if (alive := module()) is not None:
        alive.set_reduced_grads_hook(None)
