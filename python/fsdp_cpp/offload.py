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

    def take(self, size: int) -> bool:
        """Takes that many bytes. Returns False, and takes nothing, if fewer are left."""
        if size > self.left():
            return False
        self._taken[dist.get_rank()] = self._taken.get(dist.get_rank(), 0) + size
        return True

    def left(self) -> int:
        """The bytes that are left to this rank."""
        return self.size - self._taken.get(dist.get_rank(), 0)

    def __deepcopy__(self, memo: dict) -> DeviceBudget:
        return self  # copies of a policy share its budget


@dataclass
class CPUOffloadPolicy(torch_fsdp.CPUOffloadPolicy):
    """torch's policy, with a budget. Give one policy to all calls for a model, the first layers first.

    What a call of fully_shard manages stays on the device as long as it fits into the budget. Without a budget,
    everything is offloaded.
    """

    budget: DeviceBudget | int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.budget, int):
            self.budget = DeviceBudget(self.budget)


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

    A parameter's gradient must come from the forward of its module alone: a penalty on the shards could add to it during
    the update.

    If backward or `finish` raises, some parameters are updated and others are not, perhaps on this rank alone. Call
    `discard`, then load a checkpoint on all ranks.

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
        if not hasattr(module, "set_reduced_grads_hook"):
            raise ValueError(f"[StepInBackward] {type(module).__name__} is not sharded; call fully_shard first")
        self._optimizer = optimizer
        self._before_update = before_update
        self._names: dict[torch.Tensor, str] = {param: name for name, param in module.named_parameters()}
        self._ids = self._param_ids()
        self._in_optimizer = {param for group in optimizer.param_groups for param in group["params"]}
        if self._in_optimizer.isdisjoint(self._names):
            raise ValueError("[StepInBackward] the optimizer has no parameter of the module; make it after fully_shard")
        self._updated: set[torch.Tensor] = set()  # since the last `finish`
        self._for_finish: list[_Complete] = []  # that are not in host memory
        self._discards = False
        self._stepping_thread: int | None = None
        self._under_way = _UnderWay()
        # Neither the module nor the optimizer keeps this object alive.
        add, check_unused = weakref.WeakMethod(self._add), weakref.WeakMethod(self._check_unused)
        hooked: Any = module
        hooked.set_reduced_grads_hook(lambda grads: _call(add, grads))
        hooks = [
            optimizer.register_step_pre_hook(lambda *_: _call(check_unused, "the optimizer's step()")),
            optimizer.register_state_dict_pre_hook(lambda *_: _call(check_unused, "state_dict()")),
            optimizer.register_load_state_dict_pre_hook(lambda *_: _call(check_unused, "load_state_dict()")),
            module.register_state_dict_pre_hook(lambda *_: _call(check_unused, "state_dict()")),
        ]
        self._end = weakref.finalize(self, _end, self._under_way, weakref.ref(module), hooks)
        _all.add(self)

    def finish(self) -> None:
        """Waits until all parameters that have a gradient are updated, and clears their gradients.

        Call it after each backward that is a step. If an update failed, raises its error.
        """
        updated, for_finish = self._wait()
        error, self._under_way.error = self._under_way.error, None
        if error is not None:
            self._optimizer.zero_grad()
            raise error
        self._check_same_parameters()
        for complete in for_finish:
            self._check_grads(complete)
        left = [param for group in self._optimizer.param_groups for param in group["params"] if param.grad is not None]
        for param in left:
            if param in updated:
                self._refuse(param)
        if left:
            self._step(_Complete(left))

    def discard(self) -> None:
        """Leaves out the updates that have not begun, and clears all gradients. Call it after an error."""
        self._discards = True
        self._wait()
        self._discards = False
        self._under_way.error = None
        self._optimizer.zero_grad()

    def close(self) -> None:
        """Ends the thread. From now on, the optimizer steps as usual."""
        self._end()

    def __enter__(self) -> StepInBackward:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def _wait(self) -> tuple[set[torch.Tensor], list[_Complete]]:
        """Waits for the thread. Returns the parameters that it has updated, and those that are left."""
        self._under_way.wait()
        self._under_way.release()
        updated, self._updated = self._updated, set()
        for_finish, self._for_finish = self._for_finish, []
        return updated, for_finish

    def _add(self, grads: _C.ReducedGrads) -> None:
        """Called in backward. Those of the parameters that are on the host are updated soon."""
        self._under_way.grads.append(grads)
        on_host: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for param in grads.params:
            if param in self._in_optimizer:
                (on_host if local_of(param).is_cpu else others).append(param)
        for param in on_host:
            if param in self._updated:
                self._refuse(param)
            self._updated.add(param)
        self._for_finish.append(_Complete(others))
        if on_host:
            self._under_way.call(functools.partial(self._update, _Complete(on_host), grads))

    def _update(self, complete: _Complete, grads: _C.ReducedGrads) -> None:
        """Called by the thread. After an error, the rest of the step is left out."""
        try:
            grads.wait()
            if self._under_way.error is None and not self._discards:
                self._check_grads(complete)
                self._step(complete)
        except BaseException as error:
            self._under_way.error = error

    def _step(self, complete: _Complete) -> None:
        if self._before_update is not None:
            with torch.no_grad():
                self._before_update(complete.params)
            complete = _Complete(complete.params)
        self._check_same_parameters()
        with self._only(complete.params):
            self._optimizer.step()
        self._check_grads(complete)
        for param in complete.params:
            param.grad = None

    @contextlib.contextmanager
    def _only(self, params: list) -> Iterator[None]:
        """Inside of it, the optimizer has these parameters only.

        They keep their places in the parameter groups, which decide how LowPrecisionAdamW rounds them. In the other
        places is a tensor without gradient.
        """
        some, nothing = set(params), torch.empty(0)
        lists = [group["params"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["params"] = [param if param in some else nothing for param in group["params"]]
        self._stepping_thread = threading.get_ident()
        try:
            yield
        finally:
            self._stepping_thread = None
            for group, every in zip(self._optimizer.param_groups, lists, strict=True):
                group["params"] = every

    def _check_unused(self, what: str) -> None:
        """Called before others use the optimizer or the parameters."""
        if self._under_way.grads and self._stepping_thread != threading.get_ident():
            raise RuntimeError(f"[StepInBackward] call its finish() after backward, before {what}")

    def _check_grads(self, complete: _Complete) -> None:
        """What was added to a gradient would be lost, or be a second step. Without one there would be none."""
        for param, (grad, version) in zip(complete.params, complete.grads, strict=True):
            if param.grad is not grad or grad is None or _version_of(grad) != version:
                raise RuntimeError(
                    f"[StepInBackward] the gradient of parameter '{self._names.get(param, '?')}' was changed or "
                    "cleared between backward and finish(). Only before_update may change it, not an optimizer or "
                    "clipping, and only the forward of its own module may use the parameter"
                )

    def _param_ids(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self._optimizer.param_groups]

    def _check_same_parameters(self) -> None:
        if self._param_ids() != self._ids:
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
        if updates._under_way.grads and not updates._in_optimizer.isdisjoint(params):
            raise RuntimeError(
                f"[{api}] the parameters are still being updated by the StepInBackward, which cannot be combined with "
                "it; call its finish() after each backward"
            )


class _Complete:
    """Parameters whose gradients are complete, and these gradients with their versions."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.grads = [(param.grad, _version_of(param.grad)) for param in params]


def _version_of(grad: torch.Tensor | None) -> int:
    """Changes when somebody writes to the gradient, as a DTensor or to its local part."""
    return -1 if grad is None else grad._version + local_of(grad)._version


class _UnderWay:
    """Updates that wait, and the thread that makes them one after the other.

    Knows its StepInBackward only as long as it has something to do for it, and outlives it.
    """

    def __init__(self) -> None:
        self.grads: list[_C.ReducedGrads] = []  # until `finish`, so that nobody else uses the parameters
        self.error: BaseException | None = None
        self._waiting: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="StepInBackward", daemon=True)
            self._thread.start()
        self._waiting.put(function)

    def wait(self) -> None:
        if self._thread is threading.current_thread():
            raise RuntimeError("[StepInBackward] before_update must not call finish() or discard(): they wait for it")
        if self._thread is not None:
            done = threading.Event()
            self._waiting.put(done.set)
            done.wait()

    def release(self) -> None:
        for grads in self.grads:
            grads.release()
        self.grads.clear()

    def end(self) -> None:
        """Does what is waiting. Then warns of what nobody will hear of otherwise."""
        if self._thread is not None:
            self._waiting.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        if self.error is not None:
            warnings.warn(f"[StepInBackward] an update failed: {self.error}", stacklevel=3)
        elif self.grads:
            warnings.warn(
                "[StepInBackward] finish() was not called after the last backward; parameters that are not in host "
                "memory were not updated",
                stacklevel=3,
            )
        self.release()

    def _run(self) -> None:
        while (function := self._waiting.get()) is not None:
            function()
            del function  # the next one may be long in coming


def _call(method: weakref.WeakMethod, *args: Any) -> None:
    if (alive := method()) is not None:
        alive(*args)


def _end(under_way: _UnderWay, module: weakref.ref, hooks: list) -> None:
    under_way.end()
    for hook in hooks:
        hook.remove()
    if (alive := module()) is not None:
        alive.set_reduced_grads_hook(None)
