"""Which modules and parameters a call of fully_shard manages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _get_root_modules
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def check_module(module: nn.Module | list[nn.Module], function: str) -> None:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
        raise ValueError(f"{function} does not support containers that do not implement forward: {module}")


def roots_of(module: nn.Module | list[nn.Module]) -> tuple[nn.Module, ...]:
    return (module,) if isinstance(module, nn.Module) else tuple(_get_root_modules(list(module)))


def managed_modules(
    roots: Iterable[nn.Module],
    ignored: set[nn.Parameter],
    is_managed_elsewhere: Callable[[nn.Module], bool],
) -> list[nn.Module]:
    """The modules at and below `roots`, children first, without those that another call manages."""
    roots = list(roots)
    found: list[nn.Module] = []
    visited: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in visited or (module not in roots and is_managed_elsewhere(module)):
            return
        visited.add(module)
        for child in module.children():
            visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return [module for module in found if not ignored or not _is_ignored(module, ignored)]


def _is_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    """True if the module has no buffers, and all its parameters are ignored."""
    has_buffers = next(module.buffers(), None) is not None
    return not has_buffers and all(parameter in ignored for parameter in module.parameters())


def managed_params(modules: Iterable[nn.Module], ignored: set[nn.Parameter]) -> dict[nn.Parameter, list]:
    """The parameters, each with its sites: the modules that have it, and its name there."""
    params: dict[nn.Parameter, list] = {}
    for module in modules:
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            if param.dim() == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            if not param.is_contiguous():
                raise NotImplementedError(
                    f"FSDP does not support non-contiguous parameters yet: {param.shape=} {param.stride()=} "
                    f"(parameter '{name}' of {type(module).__name__})"
                )
            params.setdefault(param, []).append((module, name))
    return params


def move_to(device: torch.device, params: Iterable[nn.Parameter], modules: Iterable[nn.Module]) -> None:
    """Moves parameters and buffers that have memory, in place."""
    buffers = itertools.chain.from_iterable(module.buffers(recurse=False) for module in modules)
    with torch.no_grad():
        for tensor in itertools.chain(params, buffers):
            is_there = tensor.device == device or tensor.device.type == "meta"
            if is_there or isinstance(tensor, DTensor):  # which is on its own mesh
                continue
            if is_traceable_wrapper_subclass(tensor):
                moved = tensor.to(device)
                is_param = isinstance(tensor, nn.Parameter)
                torch.utils.swap_tensors(tensor, nn.Parameter(moved, tensor.requires_grad) if is_param else moved)
            else:
                tensor.data = tensor.to(device)
