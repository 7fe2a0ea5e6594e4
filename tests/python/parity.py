"""Runs the same training with torch's FSDP2 and with fsdp_cpp, and compares everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from pool import DEVICE
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_cpp


class TorchEngine:
    """The names of fsdp_cpp, from torch."""

    replicate = staticmethod(torch_replicate)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_fsdp, name)


ENGINES = {"torch": TorchEngine(), "fsdp_cpp": fsdp_cpp}
# For tests of what torch 2.11's engine cannot do.
needs_torch_2_13 = pytest.mark.skipif(
    not hasattr(torch_fsdp.FSDPModule, "reset_iter_state"), reason="torch's engine cannot do this"
)


class Collectives(TorchDispatchMode):
    """Lists the collectives of each process group that pass the dispatcher: their names, sizes and dtypes."""

    def __init__(self, with_sizes: bool = True) -> None:
        super().__init__()
        self.with_sizes = with_sizes
        self.calls: dict[Any, list[tuple]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        group: Any = None
        if func.namespace == "c10d":
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            group = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        elif func.namespace == "_c10d_functional" and isinstance(args[-1], str):  # of DTensors
            group = args[-1]
        if group is not None:
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors if self.with_sizes]
            self.calls.setdefault(group, []).append((func._schema.name, sizes))
        return func(*args, **(kwargs or {}))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mesh_of(*shape: int) -> Any:
    """One axis of all ranks, or replicas and shards."""
    names = ("shard",) if len(shape) < 2 else ("replicate", "shard")
    return dist.init_device_mesh(DEVICE, shape or (dist.get_world_size(),), mesh_dim_names=names)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 6, generator=generator).to(DEVICE)


Train = Callable[[Any, nn.Module, list], None]


def train(engine: Any, model: nn.Module, seen: list, steps: int = 3, foreach: bool | None = None) -> None:
    """Ordinary steps. `seen` gets what must be the same with both engines."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        see_grads(model, seen, loss)
        optimizer.step()
        optimizer.zero_grad()


def see_grads(model: nn.Module, seen: list, loss: torch.Tensor) -> None:
    seen.append(("loss", loss.detach().clone()))
    for name, param in model.named_parameters():
        if param.grad is not None:
            assert type(param.grad) is type(param) or not isinstance(param, DTensor), name
        seen.append((name, None if param.grad is None else whole(param.grad)))


def compare(
    make: Callable[[Any], nn.Module],
    run: Train = train,
    *,
    collectives: bool = True,
    sizes: bool = True,
    values: bool = True,
) -> None:
    """`make(engine)` makes a sharded model, and `run(engine, model, seen)` trains it.

    Their collectives are compared, with the sizes of their tensors, unless the caller says why not.
    On a GPU they are not: the engine gathers into place, and NCCL reduces with a scale.
    """
    results = {}
    for which, engine in ENGINES.items():
        torch.manual_seed(0)
        model = make(engine)
        seen: list = []
        recorded = Collectives(sizes)
        with recorded if collectives else contextlib.nullcontext():
            run(engine, model, seen)
        seen += [(name, whole(tensor)) for name, tensor in model.state_dict().items()]
        results[which] = (seen, recorded.calls)
    theirs, ours = results["torch"], results["fsdp_cpp"]
    assert [name for name, _ in theirs[0]] == [name for name, _ in ours[0]]
    for (name, expected), (_, value) in zip(theirs[0], ours[0]) if values else ():
        if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
            assert expected.dtype == value.dtype and expected.shape == value.shape, name
            assert torch.equal(expected, value), (name, (expected - value).abs().max())
        else:
            assert expected == value, (name, expected, value)
    if collectives and DEVICE == "cpu":
        assert theirs[1] == ours[1], (theirs[1], ours[1])


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def sharded_mlps(engine: Any, layers: int = 3, **options: Any) -> nn.Module:
    options.setdefault("mesh", mesh_of())
    model = nn.Sequential(*[Mlp() for _ in range(layers)])
    for layer in model:
        engine.fully_shard(layer, **options)
    return engine.fully_shard(model, **options)
