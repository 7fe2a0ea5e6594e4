"""This engine for libraries that import fully_shard from torch."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

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
                names[name] = pair[1]

    def undo() -> None:
        for names, name, theirs in replaced:
            names[name] = theirs
        replaced.clear()

    return undo
