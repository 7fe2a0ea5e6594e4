"""Checkpoints with checksums that a kill at any moment does not damage, for any number of ranks."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from . import _C
from ._mesh import spec_of

_waiters = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fsdp_cpp.async_save")


def save(state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
    """Writes a checkpoint into the folder `path`, which all ranks must see. All ranks must call it.

    `state_dict` is a tree of dicts, lists and tuples. Its leaves are DTensors, of which each rank writes its part;
    tensors, which must be the same on all ranks; bools, numbers and strings. None is not saved. The checkpoint
    appears whole or not at all. `fsdp inspect`, `fsdp verify` and `fsdp convert` read it.
    """
    _C.save(_items(state_dict), os.fspath(path), overwrite)


def async_save(
    state_dict: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = True
) -> concurrent.futures.Future[None]:
    """Like `save`, but returns as soon as the tensors are copied. The future ends with the checkpoint.

    A second save waits for the first one. The process does not end before its saves have.
    """
    return _waiters.submit(_C.async_save(_items(state_dict), os.fspath(path), overwrite).result)


def load(
    state_dict: MutableMapping[str, Any], path: str | os.PathLike[str], *, strict: bool = True, verify: bool = True
) -> None:
    """Fills the tensors of `state_dict` from a checkpoint, and replaces its other values. All ranks must call it.

    Meshes, placements, dtypes and the number of ranks may differ from those that were saved. `path` is what `save`
    wrote, a folder of safetensors files, or one such file. With `strict`, every value must be there. With `verify`,
    the data is compared with the checksums. Nothing changes on any rank unless every rank could read all it needs.
    """
    if os.path.exists(os.path.join(path, ".metadata")):
        raise ValueError(
            f"{os.fspath(path)} was written by torch.distributed.checkpoint: load it with that, then use fsdp_cpp.save"
        )
    _fill(state_dict, "", dict(_C.load(_items(state_dict), os.fspath(path), strict, verify)))


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    children = _children(value)
    if children is None:
        yield key, value
    else:
        for name, child in children:
            yield from _leaves(child, f"{key}.{name}" if key else str(name))


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else None


def _fill(value: Any, key: str, loaded: dict[str, Any]) -> Any:
    """Puts what was loaded into a tree, and returns it. A tuple is made anew."""
    children = _children(value)
    if children is None:
        return loaded.get(key, value)
    filled = [(name, _fill(child, f"{key}.{name}" if key else str(name), loaded)) for name, child in children]
    if isinstance(value, tuple):
        items = [item for _, item in filled]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for name, item in filled:
        if item is not value[name]:
            value[name] = item
    return value


def _items(state_dict: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The leaves, as the engine takes them."""
    if dist.is_initialized():
        default = dist.distributed_c10d._get_default_group()
        on_cpu = any(device.type == "cpu" for device in default._device_types)
        device_type = "cpu" if on_cpu else default._device_types[0].type
        _C.enter_world(default, dist.distributed_c10d._get_default_store(), device_type)
    meshes: dict[Any, _C.Mesh] = {}
    items = []
    for key, value in _leaves(state_dict, ""):
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if mesh.get_coordinate() is None:
                continue  # other ranks have it
            if mesh not in meshes:
                meshes[mesh] = _C.Mesh(spec_of(mesh), dist.distributed_c10d._get_default_group())
            placements = [_numbers(placement, key) for placement in value.placements]
            value = _C.DTensor(value._local_tensor.detach(), meshes[mesh], placements, list(value.shape))
        elif isinstance(value, torch.Tensor):
            value = value.detach()
        elif not isinstance(value, (bool, int, float, str, type(None))):
            raise TypeError(
                f"'{key}' is a {type(value).__name__}, but a checkpoint has tensors, bools, numbers and strings; "
                "convert it, or keep it elsewhere"
            )
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"'{key}' is {value}, which has more than 64 bits")
        if value is not None:
            items.append((key, value))
    return items


def _numbers(placement: Placement, key: str) -> list[int]:
    """A placement, as the engine takes it."""
    if isinstance(placement, Partial):
        raise ValueError(f"'{key}' is a sum that is not complete ({placement}); redistribute it before saving")
    if isinstance(placement, _StridedShard):
        return [placement.dim, int(placement.split_factor)]
    return [placement.dim] if isinstance(placement, Shard) else []
