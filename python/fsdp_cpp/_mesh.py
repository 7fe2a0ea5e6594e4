"""The user's DeviceMesh: what it must be like, and what the engine is told of it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._logging import warning_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import _C

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")  # as torch does


def default_mesh(names: tuple[str, ...] | None = None) -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=names)


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def check_no_dims(dp_mesh_dims: Any) -> None:
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "fsdp_cpp does not take dp_mesh_dims yet: give it the mesh of data parallelism itself "
            '(mesh["dp"]), or take fully_shard from torch.distributed.fsdp'
        )


def check_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")


@dataclasses.dataclass(frozen=True)
class ParamMesh:
    """A mesh over which parameters are sharded, replicated (one axis), or both (two axes)."""

    mesh: DeviceMesh
    replicated: bool = False

    @property
    def shard_size(self) -> int:
        return 1 if self.replicated else self.mesh.size(self.mesh.ndim - 1)

    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        return tuple(self.mesh.get_group(axis) for axis in range(self.mesh.ndim))

    def spec(self) -> _C.MeshSpec:
        groups = self.groups()
        return _C.MeshSpec(
            self.mesh.device_type,
            list(groups),
            [dist.get_process_group_ranks(group) for group in groups],
            self.mesh.mesh.flatten().tolist(),
            list(self.mesh.mesh_dim_names or ()),
            self.replicated,
        )

    def dtensor(self, whole: nn.Parameter, meta: TensorMeta, dim: int, shard: torch.Tensor) -> nn.Parameter:
        """The parameter that a user sees at rest."""
        if self.replicated:
            placements: tuple[Any, ...] = (Replicate(),)
        else:
            placements = (*[Replicate()] * (self.mesh.ndim - 1), Shard(dim))
        spec = DTensorSpec(self.mesh, placements, tensor_meta=meta)
        dtensor = DTensor(shard, spec, requires_grad=False)
        return nn.Parameter(dtensor, requires_grad=whole.requires_grad)


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


def _new_group(ranks: list[int]) -> dist.ProcessGroup:
    return dist.new_group(ranks, use_local_synchronization=True)


_C.set_new_group(_new_group)
