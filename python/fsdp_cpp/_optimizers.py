"""What the optimizers of the package share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._placements import local_of


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Calls the closure of a step with gradients enabled, and returns its loss. None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def local_grad_of(param: torch.Tensor, group: int, index: int) -> torch.Tensor:
    """This rank's part of the gradient, which must be placed as the parameter is. The numbers are for a message."""
    grad = param.grad
    assert grad is not None
    if isinstance(param, DTensor) and (not isinstance(grad, DTensor) or grad.placements != param.placements):
        placements = grad.placements if isinstance(grad, DTensor) else "none"
        raise ValueError(
            f"parameter {index} of group {group} has the placements {param.placements}, and its gradient {placements}: "
            "redistribute the gradient"
        )
    return local_of(grad)
