"""AdamW for parameters in bf16, with moments in 16 or 8 bits. See docs/low_precision.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from . import _C
from ._optimizers import local_grad_of, loss_of
from ._placements import EngineMeshes, local_of

_MOMENTS = ("exp_avg", "exp_avg_sq")


class LowPrecisionAdamW(torch.optim.Optimizer):
    """AdamW that rounds what it stores stochastically, so that small updates count on average.

    Parameters are in bf16, without a copy in fp32, or in fp32. `moments` is the dtype of the moments: torch.bfloat16,
    torch.float32, or torch.float8_e4m3fn, which takes a byte for each element and a scale for each 256 of them.

    The rounding depends on `seed`, the step, the parameter and the position of the element in the whole parameter:
    replicas stay equal, and any number of ranks rounds alike, but for 8-bit moments. `state_dict()` holds 8-bit moments
    in bf16, which loses nothing, for any number of ranks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        moments: torch.dtype = torch.bfloat16,
        stochastic_rounding: bool = True,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
        }
        self._meshes = EngineMeshes()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own. Raises ValueError if an option has an invalid value."""
        group = {**self.defaults, **param_group}
        _options(group)  # checks them
        # A name, so that every kind of checkpoint can hold it.
        super().add_param_group({**param_group, "moments": str(group["moments"]).removeprefix("torch.")})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not hasattr(self, "_meshes"):  # it was unpickled
            self._meshes = EngineMeshes()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parts of the parameters. Returns the loss of `closure`, if there is one."""
        loss = loss_of(closure)
        options = [_options(group) for group in self.param_groups]
        updates = [(number, param, local_grad_of(param, *number)) for number, param in self._updates()]
        for number, param, grad in updates:  # before anything changes
            self._check(number, param, grad)
        for number, param, grad in updates:
            state = self.state[param]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                for name in _MOMENTS:
                    self._store(number, param, name, None)
            given: Any = local_of(param)
            if isinstance(param, DTensor):
                given = self._meshes.dtensor(param, param._local_tensor, f"parameter {number[1]} of group {number[0]}")
            exp_avg, exp_avg_sq = (self._stored(param, name) for name in _MOMENTS)
            _C.low_precision_step(number, given, grad, exp_avg, exp_avg_sq, int(state["step"]), options[number[0]])
            state["step"] += 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state in a form that does not depend on the number of ranks: 8-bit moments are in bf16."""
        result = super().state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [each for group in result["param_groups"] for each in group["params"]]
        for key, param in zip(ids, params):
            state = result["state"].get(key, {})
            if "exp_avg_scale" in state:
                whole = {"step": state["step"]}
                for name in _MOMENTS:
                    floats = _C.unpack_moment(self._stored(param, name), name == "exp_avg_sq")
                    whole[name] = _like(param, floats.to(torch.bfloat16))
                result["state"][key] = whole
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Options that the state dict does not have, for example one of torch.optim.AdamW, stay as they are."""
        for given in state_dict["param_groups"]:
            for name in ("amsgrad", "maximize"):
                if given.get(name):
                    raise ValueError(f"the state is of an optimizer with {name}=True, which LowPrecisionAdamW cannot do")
        groups = [
            {**mine, **given, "moments": mine["moments"]}
            for mine, given in zip(self.param_groups, state_dict["param_groups"])
        ]
        super().load_state_dict({**state_dict, "param_groups": groups + state_dict["param_groups"][len(groups) :]})
        # torch casts a state to the dtype of the parameter, so the moments are taken from the state dict again.
        for number, (group, given) in enumerate(zip(self.param_groups, state_dict["param_groups"])):
            for index, (param, key) in enumerate(zip(group["params"], given["params"])):
                for name in _MOMENTS:
                    if name in state_dict["state"].get(key, {}):
                        self._store((number, index), param, name, local_of(state_dict["state"][key][name]))

    def _updates(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """The parameters that have a gradient, each once, with the numbers of their groups and their own."""
        seen = set()
        for number, group in enumerate(self.param_groups):
            for index, param in enumerate(group["params"]):
                if param.grad is not None and param not in seen:
                    seen.add(param)
                    yield (number, index), param

    def _check(self, number: tuple[int, int], param: torch.Tensor, grad: torch.Tensor) -> None:
        """Raises ValueError if the parameter cannot be updated."""
        name = f"parameter {number[1]} of group {number[0]}"
        if param.dtype not in (torch.bfloat16, torch.float32) or grad.dtype != param.dtype:
            raise ValueError(
                f"{name} is in {param.dtype}, and its gradient in {grad.dtype}: both must be in torch.bfloat16, or "
                "both in torch.float32"
            )
        if grad.layout is not torch.strided:
            raise ValueError(f"{name} has a sparse gradient: make an embedding without the option `sparse`")
        stored, wanted = self.state.get(param, {}).get("exp_avg"), _moments_dtype(self.param_groups[number[0]])
        if stored is not None and stored.dtype != wanted:
            raise ValueError(
                f"the moments of {name} are in {stored.dtype}, but the option `moments` is {wanted}: set it back, or "
                "drop the state with state.clear()"
            )

    def _stored(self, param: torch.Tensor, name: str) -> _C.StoredMoment:
        state = self.state[param]
        return local_of(state[name]), state.get(f"{name}_scale")

    def _store(
        self, number: tuple[int, int], param: torch.Tensor, name: str, floats: torch.Tensor | None
    ) -> None:
        """Puts a moment into the state, with zeros if there are no floats."""
        local = local_of(param)
        if floats is not None and floats.shape != local.shape:
            raise ValueError(
                f"{name} of parameter {number[1]} of group {number[0]} has other sizes on this rank, "
                f"{list(floats.shape)} instead of {list(local.shape)}: load the state with "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which divides it"
            )
        dtype = _moments_dtype(self.param_groups[number[0]])
        values, scale = _C.pack_moment(local, dtype, name == "exp_avg_sq", floats)
        self.state[param][name] = _like(param, values)
        self.state[param].pop(f"{name}_scale", None)
        if scale is not None:
            self.state[param][f"{name}_scale"] = scale


def _like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor that is placed as the parameter is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def _moments_dtype(group: dict[str, Any]) -> torch.dtype:
    dtype = group["moments"]
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _options(group: dict[str, Any]) -> _C.LowPrecisionAdamWOptions:
    """The options of a group, as the engine takes them. Raises ValueError if one has an invalid value."""
    return _C.LowPrecisionAdamWOptions(
        float(group["lr"]),
        tuple(group["betas"]),
        group["eps"],
        group["weight_decay"],
        _moments_dtype(group),
        group["stochastic_rounding"],
        group["seed"],
    )
