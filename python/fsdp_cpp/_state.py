"""The state of one call of fully_shard: the bridge between modules and the engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.distributed._composable_state import (
    _get_module_state,
    _insert_module_state,
    _module_state_mapping,
    _State,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from . import _C, _extension, _trees
from ._mesh import ParamMesh, spec_of
from ._placements import spec_at_rest
from ._tensor_parallel import piece_of, pieces_of

_C.set_dtensor_class(DTensor, getattr(DTensor, "__new__"))
_C.set_tree_functions(_trees.children, _trees.rebuild)


# The parameters that states manage, as users gave them, and the engine's tensor if that is another one. A
# module that another call manages may still have one of them.
_managed = WeakIdKeyDictionary()
# The names of the parameters of a module that are managed. (A weak reference to the parameter itself would keep
# Module.to from swapping it.)
_managed_sites: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def is_managed(param: nn.Parameter) -> bool:
    return param in _managed


def is_managed_site(module: nn.Module, name: str) -> bool:
    return name in _managed_sites.get(module, ())


def _holder(module: nn.Module) -> Any:
    """Where the engine shows a parameter: see Site in dtensor_param.h."""
    is_plain = type(module).__setattr__ is nn.Module.__setattr__
    return module._parameters if is_plain else weakref.ref(module)


class State(_State):
    """Made by the decorator of fully_shard, before its arguments are known. `init` does the work."""

    engine: _C.State

    @torch.inference_mode(False)  # parameters that are made in inference mode could never be trained
    def init(
        self,
        modules: tuple[nn.Module, ...],
        device: torch.device,
        home: torch.device,
        groups: list[tuple[ParamMesh, list[tuple[nn.Parameter, int]], int]],
        sites: dict[nn.Parameter, list],
        shared: dict[nn.Parameter, list],
        policy: _C.PolicySpec,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard: bool,
    ) -> None:
        self.device = device
        self._modules = [weakref.ref(module) for module in modules]
        # The engine's tensor of every site. Those in `shared` belong to another state: the first
        # forward of a root finds them, and throws.
        opaque = {param for param in sites if _extension.is_opaque(param)}
        pieces = {
            param: _extension.stand_in(param, home) if param in opaque else piece_of(param, home) for param in sites
        }
        pieces |= {param: param if _managed[param] is None else _managed[param] for param in shared}
        self._sites: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Parameter]] = weakref.WeakKeyDictionary()
        for param, where in (*sites.items(), *shared.items()):
            for module, name in where:
                self._sites.setdefault(module, {})[name] = pieces[param]
        at_rest = {
            param: spec_at_rest(sites[param][0][1], param, dim, mesh)
            for mesh, params, _ in groups
            for param, dim in params
        }
        specs = [
            _C.GroupSpec(
                spec_of(mesh.mesh),
                mesh.replicated,
                [(sites[param][0][1], pieces[param], dim, param in opaque) for param, dim in params],
                ranks,
            )
            for mesh, params, ranks in groups
        ]
        name = ", ".join(type(module).__name__ for module in modules)
        world = dist.distributed_c10d._get_default_group()
        look = _looker(weakref.ref(self))
        self.engine = _C.State(name, list(modules), device.type, world, specs, policy, auto_reshard, look)
        for i, (mesh, params, _) in enumerate(groups):
            for k, (param, dim) in enumerate(params):
                divided = pieces_of(param, mesh.data_axes)
                extension = None
                shard = self.engine.shard(i, k)
                if param in opaque:
                    module, site = sites[param][0]
                    shard = _extension.shard_of(param, dim, mesh, home)
                    extension = _extension.Extension(
                        site, module, param, shard, dim, mesh, device, mp_policy, divided
                    )
                dtensor = nn.Parameter(
                    DTensor(shard, at_rest[param], requires_grad=False), requires_grad=param.requires_grad
                )
                where = [(_holder(module), site) for module, site in sites[param]]
                for module, site in sites[param]:
                    module._parameters[site] = dtensor  # what the engine does not know, it takes for a replacement
                    _managed_sites.setdefault(module, set()).add(site)
                self.engine.bind(i, k, pieces[param], divided, dtensor, where, extension)
                _managed[param] = pieces[param] if pieces[param] is not param else None
        for module in modules:
            _insert_module_state(module, self)
        self._register_hooks(modules, {module for all_sites in sites.values() for module, _ in all_sites})

    def _register_hooks(self, modules: tuple[nn.Module, ...], owners: set[nn.Module]) -> None:
        pre_forward, post_forward = _C.forward_hooks(self.engine)
        for module in modules:
            module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(post_forward)
        own = weakref.ref(self)

        def show_shards(*_args: Any, **_kwargs: Any) -> None:
            if (state := own()) is not None:
                state.engine.show_shards()

        for module in owners:
            module.register_state_dict_pre_hook(show_shards)
            module._register_load_state_dict_pre_hook(show_shards)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a module that fsdp_cpp shards has no '{name}'. If a function of torch asked for it, use that of fsdp_cpp, or "
            "call fsdp_cpp.patch_torch() first"
        )

    # ---- What torch.distributed.pipelining uses of a root's state to reduce gradients after all microbatches

    @property
    def _state_ctx(self) -> State:
        return self

    @property
    def all_states(self) -> list[State]:
        return [self]

    @property
    def _fsdp_param_groups(self) -> list:
        return []  # the engine reduces the gradients of all groups in the callback

    @property
    def _fsdp_param_group(self) -> None:
        return None  # the same, in torch 2.11

    def _root_post_backward_final_callback(self) -> None:
        self.engine.finish_backward()

    # ---- What the engine asks

    def look(self, with_tensors: bool) -> tuple[list, list]:
        """The sharded modules at and below this state's, and the parameters."""
        roots = [root for ref in self._modules if (root := ref()) is not None]
        below = [item for root in roots for item in _all_names(root, "", set())]
        states = [(name, module, state) for name, module in below if (state := state_of(module)) is not None]
        _check_no_engine_above([state for _, _, state in states])
        nodes = [(name, module, state.engine) for name, module, state in states]
        if not with_tensors:
            return nodes, []
        wholes: dict[nn.Module, dict[str, nn.Parameter]] = {}
        for _, _, state in states:
            for module, sites in state._sites.items():
                wholes.setdefault(module, {}).update(sites)
        params = [
            (f"{name}.{site}" if name else site, whole)
            for name, module in below
            for site in module._parameters
            if (whole := wholes.get(module, {}).get(site)) is not None
        ]
        return nodes, params


def _check_no_engine_above(states: list[State]) -> None:
    """torch's fully_shard takes the parameters below it, also those of this engine, which would then train on copies."""
    for ref in _module_state_mapping.keyrefs():
        module = ref()
        other = _get_module_state(module) if module is not None else None
        if not isinstance(other, FSDPState):
            continue
        groups = getattr(other, "_fsdp_param_groups", None) or [other._fsdp_param_group]  # one in torch 2.11
        for info in (param._module_info for group in groups if group for param in group.fsdp_params):
            if any(info.param_name in state._sites.get(info.module, ()) for state in states):
                raise ValueError(
                    f"torch's own fully_shard took parameter '{info.param_name}' of a {type(info.module).__name__} "
                    "that fsdp_cpp had sharded: use one of them for the whole model"
                )


def _all_names(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules at and below this one, each under all names that its parents have for it.

    What is below a module is told once: of modules that contain each other, there is no end of names.
    """
    yield name, module
    if module not in seen:
        seen.add(module)
        for child_name, child in module._modules.items():
            if child is not None:
                yield from _all_names(child, f"{name}.{child_name}" if name else child_name, seen)


def _looker(own: weakref.ref[State]) -> Any:
    @_disable_dynamo
    def look(with_tensors: bool) -> tuple[list, list]:
        state = own()
        return state.look(with_tensors) if state is not None else ([], [])

    return look


def state_of(module: nn.Module) -> State | None:
    state = _get_module_state(module)
    return state if isinstance(state, State) else None
