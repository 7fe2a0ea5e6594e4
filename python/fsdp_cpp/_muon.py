"""Muon for sharded matrices. See docs/muon.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from . import _C
from ._optimizers import local_grad_of, loss_of
from ._placements import EngineMeshes, local_of

_ADJUST_LR_FNS = (None, "original", "match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon that gathers each matrix on one rank only, which sends the others their parts of its update.

    Options and state have the names of torch.optim.Muon. A parameter of two dims is a matrix, one of three dims a
    stack of matrices (experts), one of four or more a convolution. Parameters of fewer dims, and groups with
    `adamw=True` (for embeddings and heads), are updated by AdamW with `betas` and `adamw_eps`. With `blocks`, each
    matrix is taken as that many matrices, one below the other: the heads of a projection. `ns_dtype` is the dtype of
    the Newton-Schulz iteration and of matrices on their way between ranks.

    `step` is collective: a parameter must have a gradient on all ranks that share it, or on none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        blocks: int = 1,
        adamw: bool = False,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "blocks": blocks,
            "adamw": adamw,
            "betas": betas,
            "adamw_eps": adamw_eps,
        }
        self._steps = _C.MatrixSteps()
        self._meshes = EngineMeshes()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own. Raises ValueError if an option has an invalid value."""
        group = {**self.defaults, **param_group}
        _options(group)  # checks them
        # A name, so that every kind of checkpoint can hold it.
        super().add_param_group({**param_group, "ns_dtype": str(group["ns_dtype"]).removeprefix("torch.")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_steps"):  # it was unpickled
            self._steps = _C.MatrixSteps()
            self._meshes = EngineMeshes()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options that the state dict does not have, for example one of torch.optim.Muon, stay as they are."""
        groups = [{**own, **given} for own, given in zip(self.param_groups, state_dict["param_groups"])]
        super().load_state_dict({**state_dict, "param_groups": groups + state_dict["param_groups"][len(groups) :]})

    def set_exchange_numel(self, numel: int) -> None:
        """Sets how many elements of matrices are exchanged at a time, per rank."""
        self._steps.set_exchange_numel(numel)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters. Returns the loss of `closure`, if there is one. All ranks must call it."""
        loss = loss_of(closure)
        matrices = list(self._matrices())
        options = [_options(group) for group in self.param_groups]
        updates = [self._update(*each) for each in matrices]
        self._steps.prepare(updates, options)  # before anything changes
        momenta = [self._momentum(*each) for each in matrices]
        self._steps.run([(*update[:4], momentum) for update, momentum in zip(updates, momenta)], options)
        for number, each in enumerate(self.param_groups):
            self._step_adamw(number, each)
        return loss

    def _matrices(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The parameters that Muon updates, each once, with the numbers of their groups and their own."""
        seen = set()
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if _is_matrix(group, param) and param not in seen:
                    seen.add(param)
                    yield number, index, param

    def _momentum(self, group: int, index: int, param: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the momentum. None for a parameter without a gradient."""
        if param.grad is None:
            return None
        state = self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(param)
        momentum, local = local_of(state["momentum_buffer"]), local_of(param)
        if momentum.shape != local.shape:
            raise ValueError(
                f"parameter {index} of group {group} has a momentum of other sizes on this rank, "
                f"{list(momentum.shape)} instead of {list(local.shape)}: load the state with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which divides it"
            )
        return momentum

    def _update(self, group: int, index: int, param: torch.Tensor) -> _C.MatrixUpdate:
        """A parameter, as the engine takes it, without its momentum."""
        name = f"parameter {index} of group {group}"
        grad = None
        if param.grad is not None:
            grad = local_grad_of(param, group, index)
            if grad.layout is not torch.strided:
                raise ValueError(f"{name} has a sparse gradient: make an embedding without the option `sparse`")
        given: Any = local_of(param)
        if isinstance(param, DTensor):
            given = self._meshes.dtensor(param, param._local_tensor, name)
        return (group, index, given, grad, None)

    def _step_adamw(self, number: int, group: dict[str, Any]) -> None:
        params, grads = [], []
        for index, param in enumerate(group["params"]):
            if param.grad is None or _is_matrix(group, param):
                continue
            params.append(param)
            grads.append(local_grad_of(param, number, index))
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=local_of(param).device)
                state["exp_avg"] = torch.zeros_like(param)
                state["exp_avg_sq"] = torch.zeros_like(param)
        if not params:
            return
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            [local_of(param) for param in params],
            grads,
            [local_of(state["exp_avg"]) for state in states],
            [local_of(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def _is_matrix(group: dict[str, Any], param: torch.Tensor) -> bool:
    return not group["adamw"] and param.ndim >= 2


def _options(group: dict[str, Any]) -> _C.MuonOptions:
    """The options of a group, as the engine takes them. Raises ValueError if one has an invalid value."""
    if group["adjust_lr_fn"] not in _ADJUST_LR_FNS:
        raise ValueError(f"adjust_lr_fn is {group['adjust_lr_fn']!r}, not one of {_ADJUST_LR_FNS}")
    dtype = group["ns_dtype"]
    return _C.MuonOptions(
        float(group["lr"]),
        group["weight_decay"],
        group["momentum"],
        group["nesterov"],
        tuple(group["ns_coefficients"]),
        group["eps"],
        group["ns_steps"],
        group["adjust_lr_fn"] == "match_rms_adamw",
        getattr(torch, dtype) if isinstance(dtype, str) else dtype,
        group["blocks"],
        tuple(group["betas"]),
        group["adamw_eps"],
    )
