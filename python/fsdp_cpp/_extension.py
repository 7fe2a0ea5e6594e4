"""Parameters that are tensor subclasses, which say themselves what a rank sends: for example torchao's float8."""

from __future__ import annotations

import inspect
import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _C
from ._mesh import ParamMesh
from ._placements import local_of
from ._tensor_parallel import Pieces


def is_opaque(param: torch.Tensor) -> bool:
    """Tells whether only the parameter's class knows its memory, or how to send it."""
    tensor = local_of(param)
    is_plain = type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_traceable_wrapper_subclass(tensor) or (not is_plain and hasattr(tensor, "fsdp_pre_all_gather"))


def stand_in(param: nn.Parameter, home: torch.device) -> nn.Parameter:
    """A plain parameter without memory, which the engine has in the place of an opaque one."""
    tensor = local_of(param)
    device = tensor.device if tensor.is_meta else home
    one = torch.zeros([1] * tensor.dim(), dtype=tensor.dtype, device=device)
    return nn.Parameter(one.expand(tensor.shape), requires_grad=param.requires_grad)


@torch.no_grad()
def shard_of(param: nn.Parameter, dim: int, mesh: ParamMesh, home: torch.device) -> torch.Tensor:
    """This rank's shard, made by the operators that torch's FSDP2 uses, because a class may have no others."""
    tensor = local_of(param)
    chunks = torch.chunk(tensor, mesh.shard_size, dim=dim)
    length = chunks[mesh.shard_rank].size(dim) if mesh.shard_rank < len(chunks) else 0
    shard = tensor.new_zeros(chunks[0].size()).narrow(dim, 0, length)
    if length > 0:
        shard.copy_(chunks[mesh.shard_rank])
    return shard if shard.is_meta or shard.device == home else shard.to(home)


class Extension:
    """How one opaque parameter is gathered. Its tensors keep their storages; only the memory is freed."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        param: nn.Parameter,
        shard: torch.Tensor,
        dim: int,
        mesh: ParamMesh,
        device: torch.device,
        policy: MixedPrecisionPolicy,
        pieces: Pieces | None,
    ) -> None:
        self._name = f"{type(module).__name__}.{name}"
        self._module = weakref.ref(module)
        piece = local_of(param)
        self._size, self._stride = piece.size(), piece.stride()
        padded = list(piece.size())
        padded[dim] = math.ceil(padded[dim] / mesh.shard_size)
        self._padded_size = torch.Size(padded)
        self._shard_size = shard.size()
        self._dim = dim
        self._num_ranks = mesh.shard_size
        self._mesh = mesh.shard_mesh
        self._device = device
        self._policy = policy
        self._pieces = pieces
        self.reset()

    def reset(self) -> None:
        self._leaf: nn.Parameter | None = None
        self._outputs: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []

    def send(self, shard: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        for function in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            if not hasattr(shard, function):
                raise TypeError(f"parameter {self._name} is a {type(shard).__name__}, which has no {function}")
        if shard.size() != self._shard_size:
            raise ValueError(
                f"parameter {self._name} was given a shard of size {tuple(shard.size())}; "
                f"this rank's has {tuple(self._shard_size)}"
            )
        if shard.device != self._device:
            shard = shard.to(self._device, non_blocking=True)
        pre_all_gather = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        signature = inspect.signature(pre_all_gather)
        is_old = len(signature.parameters) == 1  # as in its first version
        if not is_old and len(signature.parameters) != 5:
            raise TypeError(
                f"{type(shard).__name__}.fsdp_pre_all_gather{signature} of parameter {self._name} takes "
                "(mesh, outer_size, outer_stride, module, mp_policy)"
            )
        more = () if is_old else (self._size, self._stride, self._module(), self._policy)
        sent, metadata = pre_all_gather(self._mesh, *more)
        tensors = [sent] if isinstance(sent, torch.Tensor) else list(sent)
        if not is_old and shard.size() != self._padded_size:
            for tensor in tensors:
                if tensor.size() != self._padded_size:
                    raise ValueError(
                        f"{type(shard).__name__}.fsdp_pre_all_gather has returned a tensor of size {tuple(tensor.size())} "
                        f"for parameter {self._name}, which ranks divide unevenly; pad it to {tuple(self._padded_size)}"
                    )
        return tensors, metadata

    def receive(
        self, shard: torch.Tensor, outputs: list[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> nn.Parameter:
        """Makes what the modules see; the next time, fills it again."""
        post_all_gather = shard.fsdp_post_all_gather  # type: ignore[attr-defined]
        if self._dim > 0:
            outputs = [self._joined(output) for output in outputs]
        if self._leaf is not None:
            if _forms(outputs) != _forms(self._outputs):
                raise ValueError(
                    f"{type(shard).__name__}.fsdp_pre_all_gather has returned other tensors for parameter {self._name} "
                    f"than before: from all ranks {_forms(outputs)}, before {_forms(self._outputs)}"
                )
            for kept, received in zip(self._outputs, outputs):
                _C.move_memory(received, kept)
            for tensor in self._inner:
                _resize(tensor, tensor.numel() * tensor.itemsize)
            post_all_gather(tuple(self._outputs), metadata, dtype, out=self._leaf)
            return self._leaf
        with torch.inference_mode(False), torch.no_grad():
            whole, inner = post_all_gather(tuple(outputs), metadata, dtype)
            whole = torch.as_strided(whole, self._size, self._stride, storage_offset=0)
            self._leaf = nn.Parameter(whole, requires_grad=False) if self._pieces is None else self._pieces.leaf(whole)
        self._outputs, self._inner = outputs, list(inner)
        return self._leaf

    def _joined(self, output: torch.Tensor) -> torch.Tensor:
        """The ranks' parts side by side, in the form in which torch's FSDP2 hands them out."""
        if output.dim() <= self._dim:
            return output
        return torch.cat(output.chunk(self._num_ranks), dim=self._dim).view(output.shape)

    def free(self) -> None:
        for tensor in (*self._outputs, *self._inner):
            _resize(tensor, 0)


def _forms(tensors: list[torch.Tensor]) -> list[tuple]:
    return [(tensor.dtype, tuple(tensor.size())) for tensor in tensors]


def _resize(tensor: torch.Tensor, num_bytes: int) -> None:
    storage = tensor.untyped_storage()
    if storage.size() != num_bytes:
        storage.resize_(num_bytes)
