"""fully_shard and replicate."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable import contract
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import Shard

from . import _C, _managed, _mesh
from ._mesh import ParamMesh
from ._module import FSDPModule, ReplicateModule, swap_classes
from ._placements import local_of
from ._state import State, is_managed, is_managed_site, state_of
from .offload import DeviceBudget


def _is_of(api: str, module: nn.Module) -> bool:
    """Tells whether a composable API of that name was applied to a module."""
    return api in (_get_registry(module) or ())


def _policy(mp_policy: MixedPrecisionPolicy, offload_policy: OffloadPolicy) -> _C.PolicySpec:
    offload = offload_policy.pin_memory if isinstance(offload_policy, CPUOffloadPolicy) else None
    return _C.PolicySpec(
        mp_policy.param_dtype,
        mp_policy.reduce_dtype,
        mp_policy.output_dtype,
        mp_policy.cast_forward_inputs,
        offload,
    )


def _fits_into_budget(policy: OffloadPolicy, groups: list[tuple[ParamMesh, list, int]]) -> bool:
    """Takes what the shards of one call need from the policy's budget, if it has one and enough is left."""
    budget: DeviceBudget | None = getattr(policy, "budget", None)
    if budget is None:
        return False
    size = 0
    for mesh, params, _ in groups:
        for param, dim in params:
            local = local_of(param)
            rows = -(-local.size(dim) // mesh.shard_size)
            row_numel = local.numel() // max(1, local.size(dim))
            copies = 2 + budget.states if param.requires_grad else 1
            size += copies * rows * row_numel * local.element_size()
    return budget.take(size)


def _placement(
    param: nn.Parameter, shard_placement_fn: Callable[[nn.Parameter], Any] | None, mesh: ParamMesh
) -> tuple[int, ParamMesh]:
    """The dim on which a parameter is sharded, and the mesh."""
    result = shard_placement_fn(param) if shard_placement_fn is not None else None
    if result is None:
        return 0, mesh
    if hasattr(result, "mesh_info"):  # a ShardPlacementResult
        own = result.mesh_info
        if own.mesh is not mesh.mesh:
            dims = getattr(own, "dp_mesh_dims", None)
            mesh = ParamMesh(own.mesh) if dims is None else ParamMesh.of(own.spmd_mesh, dims)
        result = result.placement
    if not isinstance(result, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: expects Shard or None but got {result}")
    dim = result.dim + param.dim() if result.dim < 0 else result.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(f"Shard dim {result.dim} is invalid for {param.dim()}D tensor of shape {param.shape}")
    return dim, mesh


def _shard(
    api: Callable,
    module: nn.Module | list[nn.Module],
    mesh: ParamMesh,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
    ignored_params: set[nn.Parameter] | None,
    reshard_after_forward: bool | int | None = False,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
) -> nn.Module | list[nn.Module]:
    """The end of `api`: fully_shard or replicate."""
    front, other_api = (ReplicateModule, "fully_shard") if api is replicate else (FSDPModule, "replicate")
    roots = _managed.roots_of(module)
    ignored = ignored_params or set()
    managed = _managed.managed_modules(
        roots, ignored, lambda each: state_of(each) is not None or _is_of(other_api, each)
    )
    for each in managed:
        if isinstance(_get_module_state(each), FSDPState):
            raise ValueError(
                f"a {type(each).__name__} below this {type(roots[0]).__name__} belongs to torch's own fully_shard or replicate: use "
                "one of them for the whole model"
            )
    sites = _managed.managed_params(managed, ignored)
    for owner, name in itertools.chain.from_iterable(sites.values()):
        if is_managed_site(owner, name):
            raise ValueError(
                f"parameter '{name}' of {type(owner).__name__} is sharded already: call {api.__name__} on the inner "
                "modules before the outer ones"
            )
    shared = {param: sites.pop(param) for param in list(sites) if is_managed(param)}
    groups: dict[tuple, tuple[ParamMesh, list[tuple[nn.Parameter, int]], int]] = {}
    for param in sites:
        dim, own_mesh = _placement(param, shard_placement_fn, mesh)
        ranks = 0 if mesh.replicated else _mesh.ranks_after_forward(reshard_after_forward, own_mesh.shard_size)
        groups.setdefault(own_mesh.groups(), (own_mesh, [], ranks))[1].append((param, dim))
    device = _mesh.device_of(mesh.mesh.device_type)
    if _fits_into_budget(offload_policy, list(groups.values())):
        offload_policy = OffloadPolicy()
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    home = torch.device("cpu") if offloads else device  # of the shards
    _managed.move_to(home, sites, ())
    _managed.move_to(device, (), managed)
    state = api.state(roots[0])  # type: ignore[attr-defined]
    state.init(
        roots,
        device,
        home,
        list(groups.values()),
        sites,
        shared,
        _policy(mp_policy, offload_policy),
        mp_policy,
        auto_reshard=reshard_after_forward is None,
    )
    if api is fully_shard:
        for each in managed:  # for Dynamo, as torch does
            each._is_fsdp_managed_module = each._fsdp_use_orig_params = True  # type: ignore[assignment]
    swap_classes(roots, front)
    return module


@contract(state_cls=State)  # type: ignore[misc]
def fully_shard(
    module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
):
    """Shards the parameters, gradients and optimizer state of a module over the ranks of a mesh.

    Call it on the layers first and on the root last. Each call makes one group of the parameters that no earlier call
    has taken. A group is gathered by one collective before its forward and before its backward, freed afterwards, and
    its gradients are reduced by one collective. Outside of forward and backward the parameters are DTensors. Make the
    optimizer after the last call.

    Args:
        module: The module, which is changed in place. For a list of modules, all of them are one group: it is
            gathered for the first that runs, and freed after the last one.
        mesh: With one axis, parameters are sharded over it. With two axes, they are replicated over the first one and
            sharded over the second one. By default it has all ranks on one axis, on the accelerator if there is one.
        reshard_after_forward: True: parameters are freed after forward, and gathered again for backward. False: they
            stay whole until backward has used them, which takes memory and saves a gather. None: False for the root,
            True for others. An int: they stay divided over that many neighbours, which gather them for backward. It
            has to divide the number of ranks that shard.
        shard_placement_fn: Gets each parameter and returns a Shard with the dim on which to shard it, a
            ShardPlacementResult of torch, which also names a mesh, or None for dim 0.
        mp_policy: The dtypes of parameters in compute, of reductions and of outputs.
        offload_policy: CPUOffloadPolicy() keeps shards, their gradients and the optimizer state on the host. With a
            budget, only those of the last layers; see `fsdp_cpp.offload`.
        ignored_params: Parameters that stay as they are: they are not sharded, moved or reduced.
        dp_mesh_dims: The names of the axes of `mesh` over which to shard and to replicate. Then `mesh` has other axes,
            too, and all parameters are DTensors on it.

    Returns:
        `module`, whose class now has FSDPModule in front of it.
    """
    _managed.check_module(module, "fully_shard")
    over = ParamMesh.of(mesh if mesh is not None else _mesh.default_mesh(), dp_mesh_dims)
    if dp_mesh_dims is not None and not isinstance(reshard_after_forward, bool | None):
        raise NotImplementedError("reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)")
    _mesh.ranks_after_forward(reshard_after_forward, over.shard_size)  # also without parameters
    return _shard(
        fully_shard,
        module,
        over,
        mp_policy,
        offload_policy,
        ignored_params,
        reshard_after_forward,
        shard_placement_fn,
    )


@contract(state_cls=State)  # type: ignore[misc]
def replicate(
    module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
):
    """Keeps the parameters of a module whole on every rank, and averages their gradients in backward.

    Call it on the layers first and on the root last. Each call makes one group of the parameters that no earlier call
    has taken, and their gradients are reduced by one collective. `mesh` has one axis, by default that of all ranks.
    The other arguments are those of fully_shard. `dp_mesh_dims` may only name axes over which to replicate. Returns
    `module`, whose class now has ReplicateModule in front of it.
    """
    if isinstance(module, nn.Module) and _is_of("fully_shard", module):
        raise RuntimeError("Cannot apply `replicate()` on a Module already managed by `fully_shard`")
    _managed.check_module(module, "replicate")
    mesh = mesh if mesh is not None else _mesh.default_mesh(("replicate",))
    if dp_mesh_dims is None and mesh.ndim != 1:
        raise ValueError(f"replicate expects a 1D DeviceMesh but got {mesh}")
    over = ParamMesh.of(mesh, dp_mesh_dims) if dp_mesh_dims is not None else ParamMesh(mesh, replicated=True)
    if not over.replicated:
        raise ValueError(
            "replicate() with dp_mesh_dims requires replicate-only dims (no shard dims). Use fully_shard() for sharding."
        )
    return _shard(replicate, module, over, mp_policy, offload_policy, ignored_params)
