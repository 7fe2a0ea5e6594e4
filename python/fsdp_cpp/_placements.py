"""Where the parts of a parameter are at rest: the mesh and the placements of its DTensor."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import _C
from ._mesh import ParamMesh, WholeMesh, spec_of


def spec_at_rest(name: str, param: nn.Parameter, dim: int, over: ParamMesh) -> DTensorSpec:
    """The spec of a parameter that is sharded on `dim`. The parameter is plain, or of tensor parallelism."""
    if over.whole is not None:
        return _on_whole_mesh(name, param, dim, over, over.whole)
    if not isinstance(param, DTensor):
        meta = TensorMeta(param.size(), param.stride(), param.dtype)
        return DTensorSpec(over.mesh, _data_placements(over, dim, 1), tensor_meta=meta)
    spec = param._spec
    if spec.mesh.device_type != over.mesh.device_type:
        raise ValueError(
            "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
            f"{spec.mesh.device_type} for DTensor and {over.mesh.device_type} for FSDP (parameter '{name}')"
        )
    if len(spec.placements) > 2:
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {spec.placements} (of parameter '{name}')"
        )
    try:
        mesh = DeviceMesh._concatenate([over.mesh, spec.mesh])
    except Exception as error:
        raise type(error)(
            f"parameter '{name}' is a DTensor on {spec.mesh}, which cannot be combined with {over.mesh}: give "
            f'fully_shard another axis of the same mesh, for example mesh=mesh["dp"] beside mesh["tp"] ({error})'
        ) from error
    placements = (*_data_placements(over, dim, _parts(spec, dim)), *spec.placements)
    return DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)


def _parts(spec: DTensorSpec, dim: int, right_of: int = -1) -> int:
    """Into how many parts the axes to the right of an axis divide a dim."""
    axes = range(right_of + 1, spec.mesh.ndim)
    return math.prod(spec.mesh.size(axis) for axis in axes if getattr(spec.placements[axis], "dim", None) == dim)


def _shard(dim: int, parts: int) -> Placement:
    """Shards of a dim that axes further to the right divide into parts."""
    return _StridedShard(dim, split_factor=parts) if parts > 1 else Shard(dim)


def _data_placements(over: ParamMesh, dim: int, parts: int) -> tuple[Placement, ...]:
    if over.replicated:
        return (Replicate(),)
    return (*[Replicate()] * (over.mesh.ndim - 1), _shard(dim, parts))


def _on_whole_mesh(name: str, param: nn.Parameter, dim: int, over: ParamMesh, whole: WholeMesh) -> DTensorSpec:
    """The spec of a parameter whose mesh has the axes of data parallelism, too (dp_mesh_dims)."""
    if not isinstance(param, DTensor):
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
            f"distribute_module). Got plain tensor for parameter '{name}'."
        )
    spec = param._spec
    if spec.mesh != whole.mesh:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh objects: "
            f"parameter '{name}' is on {spec.mesh}, and the mesh is {whole.mesh}"
        )
    placements = list(spec.placements)
    for axis in sorted(whole.data_axes):
        is_shard = whole.names[axis] in whole.shards
        if not isinstance(placements[axis], Replicate):
            raise ValueError(
                f"Expected Replicate() on DP {'shard' if is_shard else 'replicate'} dim '{whole.names[axis]}' "
                f"(index {axis}) but got {placements[axis]} (parameter '{name}')"
            )
        if is_shard:
            placements[axis] = _shard(dim, _parts(spec, dim, right_of=axis))
    if len(whole.shards) <= 1:
        return DTensorSpec(whole.mesh, tuple(placements), tensor_meta=spec.tensor_meta)
    mesh, placements = _with_one_axis_of_shards(placements, over.mesh, whole)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def _with_one_axis_of_shards(
    placements: list[Placement], over: DeviceMesh, whole: WholeMesh
) -> tuple[DeviceMesh, list[Placement]]:
    """Puts `over`, which has several axes of the whole mesh as one, in the place of the first of them."""
    first = min(whole.names.index(shard) for shard in whole.shards)
    meshes: list[DeviceMesh] = []
    merged: list[Placement] = []
    for axis, placement in enumerate(placements):
        if axis == first:
            meshes.append(over)
            merged += [*[Replicate()] * (over.ndim - 1), placement]
        elif axis not in whole.data_axes:
            meshes.append(whole.mesh[whole.names[axis]])
            merged.append(placement)
    return DeviceMesh._concatenate(meshes), merged


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class EngineMeshes:
    """The meshes that the engine was told of, each once."""

    def __init__(self) -> None:
        self._meshes: dict[DeviceMesh, _C.Mesh] = {}

    def dtensor(self, tensor: DTensor, local: torch.Tensor, name: str) -> _C.DTensor:
        """The DTensor, as the engine takes it, with another local tensor."""
        mesh = tensor.device_mesh
        if mesh not in self._meshes:
            self._meshes[mesh] = _C.Mesh(spec_of(mesh), dist.distributed_c10d._get_default_group())
        placements = [_numbers(placement, name) for placement in tensor.placements]
        return _C.DTensor(local, self._meshes[mesh], placements, list(tensor.shape))


def _numbers(placement: Placement, name: str) -> list[int]:
    """A placement, as the engine takes it."""
    if isinstance(placement, Partial):
        raise ValueError(f"'{name}' is a sum that is not complete ({placement}); redistribute it first")
    if isinstance(placement, _StridedShard):
        return [placement.dim, int(placement.split_factor)]
    return [placement.dim] if isinstance(placement, Shard) else []
