"""Checks the user's DeviceMesh and describes it to the engine."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._logging import warning_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _C

if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims  # since torch 2.12

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # as torch does


def default_mesh(names: tuple[str, ...] | None = None) -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(default_device_type(), (dist.get_world_size(),), mesh_dim_names=names)


def default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator.type if accelerator is not None else "cpu"


def device_of(device_type: str) -> torch.device:
    """The device of that type which this rank uses."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


def _checked_names(mesh: DeviceMesh, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the axes of a mesh, which has the wanted ones."""
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in wanted:
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")
    return mesh.mesh_dim_names


def _axis(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """The named axes of a mesh as one."""
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


def spec_of(mesh: DeviceMesh) -> _C.MeshSpec:
    """The mesh, as the engine is told of it."""
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return _C.MeshSpec(
        mesh.device_type,
        groups,
        [dist.get_process_group_ranks(group) for group in groups],
        mesh.mesh.flatten().tolist(),
        list(mesh.mesh_dim_names or ()),
    )


@dataclasses.dataclass(frozen=True)
class WholeMesh:
    """A mesh on which parameters are before fully_shard, and that has the axes of data parallelism, too."""

    mesh: DeviceMesh
    names: tuple[str, ...]  # of all axes
    shards: tuple[str, ...]
    data_axes: frozenset[int]  # of shards and replicas


@dataclasses.dataclass(frozen=True)
class ParamMesh:
    """A mesh over which parameters are sharded, replicated (one axis), or both (two axes)."""

    mesh: DeviceMesh
    replicated: bool = False
    whole: WholeMesh | None = None  # with dp_mesh_dims

    @classmethod
    def of(cls, mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> ParamMesh:
        """What the arguments `mesh` and `dp_mesh_dims` of fully_shard mean."""
        if dims is None:
            _check_mesh(mesh)
            return cls(mesh)
        names = _checked_names(mesh, dims.shard_names + dims.replicate_names)
        data_axes = frozenset(names.index(name) for name in dims.shard_names + dims.replicate_names)
        axes = [_axis(mesh, names) for names in (dims.replicate_names, dims.shard_names) if names]
        over = axes[0] if len(axes) == 1 else DeviceMesh._concatenate(axes)
        whole = WholeMesh(mesh, names, dims.shard_names, data_axes)
        return cls(over, replicated=not dims.shard_names, whole=whole)

    @property
    def shard_size(self) -> int:
        return 1 if self.replicated else self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The axis over which parameters are sharded."""
        return self.mesh if self.mesh.mesh_dim_names is None else self.mesh[self.mesh.mesh_dim_names[-1]]

    @property
    def shard_rank(self) -> int:
        return 0 if self.replicated else self.mesh.get_local_rank(self.mesh.ndim - 1)

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))

    @property
    def data_axes(self) -> frozenset[int]:
        """The axes of data parallelism in the mesh that the parameters have before fully_shard."""
        return self.whole.data_axes if self.whole is not None else frozenset()


def ranks_after_forward(reshard_after_forward: bool | int | None, size: int) -> int:
    """How many ranks hold a parameter after forward: 0 means that each has all of it."""
    if reshard_after_forward is None or reshard_after_forward is True:
        return size
    if reshard_after_forward is False:
        return 0
    if not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the "
            f"group size to reshard to, not {reshard_after_forward}"
        )
    if not (1 <= reshard_after_forward <= size and size % reshard_after_forward == 0):
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a "
            f"factor of {size}, not {reshard_after_forward}"
        )
    if reshard_after_forward == 1:
        message = (
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
            "instead of reshard_after_forward=True (bool)"
        )
        warning_once(_logger, message, stacklevel=2)
        return 0
    return reshard_after_forward


# The name that the calling thread gives to the group that it makes.
_naming = threading.local()
# How many groups of the same ranks were made, by default group: with ranks as threads there are several.
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, collections.Counter] = weakref.WeakKeyDictionary()
_torch_group_name = dist.distributed_c10d._process_group_name


@functools.wraps(_torch_group_name)
def _group_name(*args: Any, **kwargs: Any) -> Any:
    return getattr(_naming, "name", None) or _torch_group_name(*args, **kwargs)


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Makes a group that only its own ranks know of.

    torch's name for it has the number of groups that a rank is in. Ranks with other numbers would never meet. This
    name has a hash of the ranks, because keys of the store have a limit.
    """
    dist.distributed_c10d._process_group_name = _group_name
    made = _made.setdefault(dist.distributed_c10d._get_default_group(), collections.Counter())
    made[tuple(ranks)] += 1
    digest = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    _naming.name = f"fsdp_cpp_{digest}_{made[tuple(ranks)]}"
    try:
        return dist.new_group(ranks, use_local_synchronization=True)
    finally:
        _naming.name = None


_C.set_new_group(_new_group)
