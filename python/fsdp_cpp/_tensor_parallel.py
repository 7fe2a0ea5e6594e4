"""Parameters that are DTensors before fully_shard: those of tensor or expert parallelism.

The engine shards this rank's piece of such a parameter over the ranks of data parallelism. Inside forward a
module sees the piece, which is whole then, as the DTensor that it was.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def piece_of(param: nn.Parameter, home: torch.device) -> nn.Parameter:
    """This rank's piece of a DTensor, which the engine shards. A plain parameter is its own piece."""
    if not isinstance(param, DTensor):
        return param
    piece = param._local_tensor.detach()
    return nn.Parameter(piece if piece.is_meta else piece.to(home), requires_grad=param.requires_grad)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How ranks have divided a parameter before fully_shard."""

    spec: DTensorSpec
    data_axes: frozenset[int]  # of the mesh: the engine itself reduces over them

    def leaf(self, piece: torch.Tensor) -> nn.Parameter:
        """The DTensor around this rank's piece. The engine gives it an accumulator of gradients."""
        spec = self.spec
        if (meta := spec.tensor_meta) is not None and meta.dtype != piece.dtype:
            spec = dataclasses.replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, piece.dtype))
        with torch.inference_mode(False), torch.no_grad():
            return nn.Parameter(DTensor(piece.detach(), spec, requires_grad=False), requires_grad=False)

    def grad(self, grad: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a gradient, which backward may have left in other placements."""
        if isinstance(grad, AsyncCollectiveTensor):
            grad = grad.wait()
        if not isinstance(grad, DTensor):
            raise TypeError(f"the gradient of a DTensor of placements {self.spec.placements} is a {type(grad).__name__}")
        placements = tuple(
            grad.placements[axis] if axis in self.data_axes else placement
            for axis, placement in enumerate(self.spec.placements)
        )
        if grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        piece = grad._local_tensor
        return piece.wait() if isinstance(piece, AsyncCollectiveTensor) else piece


def pieces_of(param: nn.Parameter, data_axes: frozenset[int]) -> Pieces | None:
    """None for a plain parameter."""
    return Pieces(param._spec, data_axes) if isinstance(param, DTensor) else None
