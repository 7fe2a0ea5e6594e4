"""This engine for libraries that import fully_shard from torch."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed.fsdp as torch_fsdp
from torch.distributed._composable import replicate_with_fsdp

from . import _fully_shard, _module


# Torch's functions and ours, by the identity of torch's.
_OURS = {
    id(theirs): (theirs, ours)
    for theirs, ours in (
        (torch_fsdp.fully_shard, _fully_shard.fully_shard),
        (torch_fsdp.register_fsdp_forward_method, _module.register_fsdp_forward_method),
        (torch_fsdp.share_comm_ctx, _module.share_comm_ctx),
        (replicate_with_fsdp.replicate, _fully_shard.replicate),
    )
}


def _redirected(ours: Callable[..., Any]) -> Callable[..., Any]:
    """What torch's function finds in its own module, under its own name."""

    @functools.wraps(ours)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    def refuse(_module: Any) -> NoReturn:
        raise RuntimeError(
            f"this {ours.__name__} was taken from torch before fsdp_cpp.patch_torch() was called, for example by "
            "functools.partial, or from torch's private modules: call patch_torch() first, and import "
            "torch.distributed.fsdp"
        )

    redirected.state = refuse  # type: ignore[attr-defined]
    return redirected


def patch_torch() -> Callable[[], None]:
    """Gives this engine to every module that has imported fully_shard from torch, or will import it.

    It replaces the functions fully_shard, register_fsdp_forward_method, share_comm_ctx and FSDP2's replicate. The
    classes stay: a module that this engine shards is an FSDPModule of torch, too. Returns a function that undoes it.
    A module that was imported in between keeps this engine.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, types.ModuleType) else {}
        for name, value in list(names.items()):
            if (pair := _OURS.get(id(value))) is not None:
                replaced.append((names, name, value))
                defines_it = names is inspect.unwrap(value).__globals__
                names[name] = _redirected(pair[1]) if defines_it else pair[1]

    def undo() -> None:
        for names, name, theirs in replaced:
            names[name] = theirs
        replaced.clear()

    return undo
