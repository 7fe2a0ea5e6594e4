"""Checkpoints for any number of ranks. They have checksums, and a kill does not damage them."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import _C
from ._placements import EngineMeshes

Path = str | os.PathLike[str]
Items = list[tuple[str, Any]]

_waiters = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="fsdp_cpp.async_save")


def save(state_dict: MutableMapping[str, Any], path: Path, *, overwrite: bool = True) -> None:
    """Writes a checkpoint into the folder `path`, which all ranks must see. All ranks must call it.

    `state_dict` is a tree of dicts, lists and tuples. Its leaves are DTensors, of which each rank writes its part, and
    plain tensors, bools, numbers and strings, which should be the same on all ranks: of those that differ, rank 0's
    are saved. None is not saved. The checkpoint appears whole or not at all. `fsdp inspect`, `fsdp verify` and
    `fsdp convert` read it.
    """
    _C.save(_agreed_items(state_dict, path), os.fspath(path), overwrite)


def async_save(
    state_dict: MutableMapping[str, Any], path: Path, *, overwrite: bool = True
) -> concurrent.futures.Future[None]:
    """Like `save`, but returns as soon as the tensors are copied. The future ends with the checkpoint.

    A second save waits for the first one. If a save fails, its future and the next save or load have the error. The
    process does not end before its saves have.
    """
    return _waiters.submit(_C.async_save(_agreed_items(state_dict, path), os.fspath(path), overwrite).result)


def load(state_dict: MutableMapping[str, Any], path: Path, *, strict: bool = True, verify: bool = True) -> None:
    """Fills the tensors of `state_dict` from a checkpoint, and replaces its other values. All ranks must call it.

    Meshes, placements and the number of ranks may differ from those that were saved. So may dtypes: values are
    converted to that of the tensor in `state_dict`. None stays None. `path` is what `save` wrote, a folder of
    torch.distributed.checkpoint, a folder of safetensors files, or one such file. With `strict`, every value must be
    there. With `verify`, the data is compared with the checksums. Nothing changes on any rank unless every rank could
    read all it needs.
    """
    _fill(state_dict, "", dict(_C.load(_agreed_items(state_dict, path), os.fspath(path), strict, verify)))


def _children(value: Any, key: str) -> list[tuple[Any, str, Any]] | None:
    """What a container has: names, keys from the top, and values."""
    if isinstance(value, MutableMapping):
        named = list(value.items())
    elif isinstance(value, (list, tuple)):
        named = list(enumerate(value))
    else:
        return None
    return [(name, f"{key}.{name}" if key else str(name), child) for name, child in named]


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    children = _children(value, key)
    if children is None:
        yield key, value
    for _, inner, child in children or ():
        yield from _leaves(child, inner)


def _fill(value: Any, key: str, loaded: dict[str, Any]) -> Any:
    """Puts what was loaded into a tree, and returns it. A tuple is made anew."""
    children = _children(value, key)
    if children is None:
        return loaded.get(key, value)
    filled = [(name, _fill(child, inner, loaded)) for name, inner, child in children]
    if isinstance(value, tuple):
        items = [item for _, item in filled]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    for name, item in filled:
        if item is not value[name]:
            value[name] = item
    return value


def _agreed_items(state_dict: MutableMapping[str, Any], path: Path) -> Items:
    """The leaves, as the engine takes them. If a rank cannot take its own, all ranks throw."""
    if not dist.is_initialized():
        _C.leave_world()
        return _items(state_dict)
    default = dist.distributed_c10d._get_default_group()
    types = [device.type for device in default._device_types]
    device_type = "cpu" if "cpu" in types or not types else types[0]
    items: Items = []
    error: Exception | None = None
    try:
        _C.enter_world(default, dist.distributed_c10d._get_default_store(), device_type)
        items = _items(state_dict)
    except Exception as caught:
        error = caught
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (error and f"{type(error).__name__}: {error}", os.fspath(path)))
    if error is not None:
        raise error
    for rank, (problem, its_path) in enumerate(told):
        if problem is not None:
            raise RuntimeError(f"rank {rank}: {problem}")
        if its_path != told[0][1]:
            raise ValueError(f"the ranks have different paths: rank 0 has {told[0][1]}, rank {rank} has {its_path}")
    return items


def _items(state_dict: MutableMapping[str, Any]) -> Items:
    meshes = EngineMeshes()
    items: dict[str, Any] = {}
    for key, value in _leaves(state_dict, ""):
        key.encode()  # throws here, and not on the way to the engine
        if isinstance(value, DTensor):
            if value.device_mesh.get_coordinate() is None:
                continue  # other ranks have it
            value = meshes.dtensor(value, _plain(value._local_tensor, key), key)
        elif isinstance(value, torch.Tensor):
            value = _plain(value, key)
        elif isinstance(value, str):
            value.encode()
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"'{key}' is {value}, which has more than 64 bits")
        elif not isinstance(value, (bool, int, float, type(None))):
            raise TypeError(
                f"'{key}' has type {type(value).__name__}, but a checkpoint has tensors, bools, numbers and strings; "
                "convert it, or keep it elsewhere"
            )
        if key in items:
            raise ValueError(f"two values have the key '{key}'; rename one of them")
        if value is not None:
            items[key] = value
    return list(items.items())


def _plain(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor without its gradient. One that is not in ordinary memory is refused."""
    has_memory = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if not has_memory or tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(
            f"'{key}' is a {type(tensor).__name__} of layout {tensor.layout}, but a checkpoint has ordinary tensors; "
            "save the tensors inside of it"
        )
    return tensor.detach()
