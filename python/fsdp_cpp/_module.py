"""FSDPModule: the class that a sharded module has in front of its own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.utils.checkpoint import _StopRecomputationError
from typing_extensions import deprecated

from . import _C
from ._state import State, state_of


class UnshardHandle(torch_fsdp.UnshardHandle):
    """Waits for an unshard that was started with async_op."""

    def __init__(self, engine: _C.State) -> None:
        self._engine: _C.State | None = engine

    def wait(self) -> None:
        """From now on the parameters are whole. A second call does nothing."""
        if self._engine is not None:
            self._engine.wait_for_unshard()
            self._engine = None


class FSDPModule(torch_fsdp.FSDPModule):
    """The methods of a sharded module. They do what those of torch's FSDPModule do."""

    _orig_cls_mro_index: int = 3  # FSDP<Name>, this class, torch's, <Name>

    # A module may have a __call__ of its own that calls nn.Module's later, as those of transformers do to recompute
    # activations. So failures of a forward are noticed where nn.Module runs it.
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._call_impl(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            _forward_failed(self, error)
            raise

    # ---- Parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module, without those of sharded modules below it."""
        engine = self._engine()
        engine.unshard()
        handle = UnshardHandle(engine)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees the whole parameters of this module: it has DTensors again."""
        self._engine().reshard()

    def reset_iter_state(self) -> None:
        """Forgets an iteration that did not end. Not needed after an exception."""
        self._engine().reset()

    # ---- One iteration

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards follow before the optimizer's step."""
        self._engine().set_is_last_backward(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: backward keeps gradients unreduced, and the next backward adds to them."""
        self._engine().set_requires_gradient_sync(requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: backward reduces gradients among shards, and not over replicas."""
        self._engine().set_requires_all_reduce(requires_all_reduce, recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Replaces what was given to fully_shard."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        self._engine().set_reshard_after_forward(reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: parameters stay whole between microbatches."""
        self._engine().set_reshard_after_backward(reshard_after_backward, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: backward does not need the parameters, and does not gather them."""
        self._engine().set_unshard_in_backward(unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[torch_fsdp.FSDPModule]) -> None:
        """Gathers these modules as soon as this one was gathered for its forward."""
        self._engine().set_modules_to_forward_prefetch(_engines_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[torch_fsdp.FSDPModule]) -> None:
        """Gathers these modules as soon as this one was gathered for its backward."""
        self._engine().set_modules_to_backward_prefetch(_engines_of(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """The next forward gathers after this event, and not after all work that is queued then."""
        device = self._get_fsdp_state().device
        if device.type != "cpu":
            stream = torch.Stream(device)
            stream.wait_event(event)
            self._engine().set_post_optim_event(stream)

    # ---- Reduction

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides gradients by this factor in the place of the number of ranks."""
        self._engine().set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Collectives only sum. The division is done beside them."""
        self._engine().set_force_sum_reduction_for_comms(enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Reduces zeros for parameters that backward did not reach: other ranks may have reached them."""
        self._engine().set_reduce_scatter_unused_params(reduce_scatter_unused_params, recurse)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reduce-scatters may be in flight."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._engine().set_reduce_scatter_max_input_buffers(max_input_buffers, recurse)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Gives reductions a process group of their own. Collective."""
        self._engine().set_separate_reduce_scatter_group(enable, recurse)

    # ---- Communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gathers the parameters of this module by `comm`, a torch.distributed.fsdp AllGather."""
        self._engine().set_custom_all_gather(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduces the gradients of this module by `comm`, a torch.distributed.fsdp ReduceScatter."""
        self._engine().set_custom_reduce_scatter(comm)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """The hook gets the reduced gradients as one flat tensor, and may reduce them further."""
        if not isinstance(stream, torch.cpu.Stream):  # which the engine does not know
            self._engine().set_all_reduce_hook(hook, stream, False)
            return

        def on_stream(flat: torch.Tensor) -> None:
            with torch.cpu.stream(stream):
                hook(flat)

        self._engine().set_all_reduce_hook(on_stream, None, True)

    def set_reduced_grads_hook(
        self, hook: Callable[[_C.ReducedGrads], None] | None, *, recurse: bool = True
    ) -> None:
        """The hook gets the gradients of each group as soon as a backward has completed them.

        Its argument has the `params`, a function `wait` that waits until the gradients are written, and a function
        `release`. Call `release` when the parameters are updated: until then, whoever else uses them gets an error.
        None removes the hook. See `fsdp_cpp.offload.StepInBackward`.
        """
        self._engine().set_reduced_grads_hook(hook, recurse)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Takes the buffers of collectives from the process group, if it has an allocator."""
        try:
            self._engine().set_allocate_memory_from_process_group_for_comm(enable)
        except ValueError as error:  # a collective is custom
            raise AssertionError(str(error)) from error

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Raises NotImplementedError: there are no buffers in symmetric memory yet."""
        self._engine().set_symm_mem_for_comm(backend)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """The engine always gathers beside compute, so there is nothing to set."""

    # ---- Inner workings

    def _get_fsdp_state(self) -> State:  # type: ignore[override]
        state = state_of(self)  # type: ignore[arg-type]
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    def _engine(self) -> _C.State:
        return self._get_fsdp_state().engine

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._engine().show_shards()  # another module of the group may have moved its parameters already
        # Past torch's FSDPModule, whose own _apply asks for torch's state.
        result = super(torch_fsdp.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        self._engine().adopt()
        return result


class ReplicateModule(FSDPModule, replicate_with_fsdp.ReplicateModule):
    """A module whose parameters are whole on every rank."""

    _orig_cls_mro_index: int = 5  # Replicate<Name>, this class, FSDPModule, torch's two, <Name>


def _refuse_deepcopy(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def _compile(self: Any, *args: Any, **kwargs: Any) -> None:
    """Compiles the forward of this module in place. See nn.Module.compile."""
    from torch._dynamo.eval_frame import skip_code  # here, because it takes a second to import

    # Dynamo skips the frame of nn.Module._call_impl, so hooks stay outside of the graph. It would trace the
    # _call_impl of FSDPModule, here and below, and with fullgraph=True it would refuse the hooks.
    skip_code(FSDPModule._call_impl.__code__)
    forward = super(torch_fsdp.FSDPModule, self)._call_impl  # type: ignore[misc]
    self._compiled_call_impl = _noticing_failures(self, torch.compile(forward, *args, **kwargs))


@functools.cache
def _sharded_class(cls: type[nn.Module], front: type) -> type:
    prefix = front.__name__.removesuffix("Module")
    members: dict[str, Any] = {"__deepcopy__": _refuse_deepcopy}
    if cls.compile is nn.Module.compile:
        members["compile"] = _compile
    return type(f"{prefix}{cls.__name__}", (front, cls), members)


def swap_classes(modules: Iterable[nn.Module], front: type) -> None:
    for module in modules:
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = _noticing_failures(module, module._compiled_call_impl)
        module.__class__ = _sharded_class(type(module), front)  # type: ignore[arg-type]


def _engines_of(modules: Iterable[Any]) -> list[_C.State]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [module._engine() for module in modules]


def _forward_failed(module: Any, error: BaseException) -> None:
    stopped = isinstance(error, _StopRecomputationError)
    module._engine().forward_failed(module, stopped)


def _noticing_failures(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled forward, which does not pass through FSDPModule._call_impl."""

    @functools.wraps(forward)
    def noticing(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except BaseException as error:
            _forward_failed(module, error)
            raise

    return noticing


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gathers and frees parameters around this method, too. Does nothing if the module is not sharded."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        engine = self._engine()
        new_arguments = engine.pre_forward(self, args, kwargs)
        if new_arguments is not None:
            args, kwargs = new_arguments
        try:
            output = method(*args, **kwargs)
            new_output = engine.post_forward(self, output)
        except BaseException as error:
            _forward_failed(self, error)
            raise
        return output if new_output is None else new_output

    setattr(module, method_name, types.MethodType(wrapped, module))


def share_comm_ctx(modules: list[torch_fsdp.FSDPModule]) -> None:
    """Makes roots that have no common root share their streams, buffers and order of communication."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")
    if modules:
        _C.share_comm_ctx(_engines_of(modules))
