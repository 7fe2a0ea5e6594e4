"""Optimizers and gradient clipping that work on the shards, past the dispatch of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from ._low_precision import LowPrecisionAdamW
from ._muon import Muon
from ._optimizers import local_grad_of, loss_of
from ._placements import local_of
from .offload import check_updated

__all__ = ["AdamW", "LowPrecisionAdamW", "Muon", "clip_grad_norm_"]


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, fused. Its state dict is the same: moments are DTensors like the parameters."""

    _fuses_by_default = False

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fused") is None and not kwargs.get("foreach") and not kwargs.get("differentiable"):
            kwargs["fused"] = self._fuses_by_default = True
        super().__init__(params, *args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. One with complex parameters is not fused, unless it says so itself."""
        says = param_group.get("fused")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if says is None and self._fuses_by_default and any(param.is_complex() for param in group["params"]):
            group["fused"] = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parts of the parameters. Returns the loss of `closure`, if there is one."""
        loss = loss_of(closure)
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None:
                    local_grad_of(param, number, index)  # checks it
            # Parameters, gradients, both moments, largest second moments, steps.
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            has_complex = self._init_group(group, *lists)
            params, grads, moments, squares, largest, steps = ([local_of(one) for one in each] for each in lists)
            beta1, beta2 = group["betas"]
            adamw(
                params,
                grads,
                moments,
                squares,
                largest,
                steps,
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                capturable=group["capturable"],
                differentiable=group["differentiable"],
                fused=group["fused"],
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                has_complex=has_complex,
            )
        return loss


def _total_norm(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm over all elements of these tensors."""
    # This rank's part of a small parameter may have no elements, of which there is no norm of order inf.
    grads = [grad if grad.numel() > 0 else grad.new_zeros(1) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, norm_type)), norm_type)


def _summed(grad: DTensor) -> DTensor:
    """The gradient without partial sums, whose terms have other norms than their sum."""
    placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
    return grad if list(grad.placements) == placements else grad.redistribute(placements=placements)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """torch.nn.utils.clip_grad_norm_ over all ranks. Returns the norm as a plain tensor on every rank."""
    norm_type, max_norm = float(norm_type), float(max_norm)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    check_updated("clip_grad_norm_", parameters)
    if not norm_type > 0:  # torch decides what these norms are
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    # Ranks hold other elements along the sharded axes of a mesh, and the same along the others.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in grads:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            grad = _summed(grad)
            axes = [i for i, placement in enumerate(grad.placements) if not placement.is_replicate()]
            groups = tuple(grad.device_mesh.get_group(axis) for axis in axes)
        by_groups.setdefault(groups, []).append(local_of(grad))
    is_max = norm_type == float("inf")
    norms = []
    for groups, local in by_groups.items():
        norm = _total_norm(local, norm_type)
        power = norm if is_max else norm**norm_type
        for group in groups:
            dist.all_reduce(power, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        norms.append(power if is_max else power ** (1.0 / norm_type))
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(local_of(grad))
    for device, local in by_device.items():
        torch._foreach_mul_(local, factor.to(device))
    return total
