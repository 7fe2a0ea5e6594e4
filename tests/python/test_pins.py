"""What PyTorch's own tests read from FSDP2's private Python, seen from outside, with both engines.

docs/python.md lists those tests. The order in which modules are gathered, freed and reduced is that of the
ranges in a profile.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from parity import ENGINES, Mlp, batch, compare, mesh_of, needs_torch_2_13, see_grads, train
from pool import DEVICE
from torch import nn
from torch.distributed._composable import replicate as ddp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp_cpp
from fsdp_cpp.observe import sharding_plan

PHASES = {
    "root_pre_forward",
    "pre_forward",
    "all_gather",
    "pre_backward",
    "post_backward_reshard",
    "post_backward_reduce",
    "root_post_backward_callback",
}


def order(profile):
    """The phases of all modules in order of time, such as 'all_gather (layers.0)'."""
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("FSDP::") for event in events if event.name.startswith("FSDP::")]
    return [name for name in names if name.split()[0] in PHASES]


def whole_ones(model):
    return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]


def same_order(make, step, **options):
    """`step(model, number)` does one step. Also compares which parameters are whole after each forward."""

    def run(engine, model, seen):
        for name, module in model.named_modules():
            if isinstance(module, torch_fsdp.FSDPModule):
                module.register_forward_hook(lambda *_, name=name: seen.append((f"after {name}", whole_ones(model))))
        for number in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                loss = step(model, number)
            seen.append(("order", order(profile)))
            assert any(name.startswith("post_backward_reduce") for name in order(profile))
            see_grads(model, seen, loss)
            model.zero_grad()

    compare(make, run, **options)


def forward_and_backward(model, number):
    loss = model(batch(number)).square().mean()
    loss.backward()
    return loss


class Net(nn.Module):
    """The root has parameters of its own."""

    def __init__(self, layers=3, checkpointed=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([Mlp() for _ in range(layers)])
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def sharded_net(engine, layers=3, checkpointed=False, **options):
    model = Net(layers, checkpointed)
    for layer in model.layers:
        engine.fully_shard(layer, mesh=mesh_of(), **options)
    return engine.fully_shard(model, mesh=mesh_of(), **options)


def forwards(model, number, count):
    loss = sum(model(batch(number + i)) for i in range(count)).square().mean()
    loss.backward()
    return loss


def order_of_forwards(count, reshard, checkpointed):
    make = functools.partial(sharded_net, checkpointed=checkpointed, reshard_after_forward=reshard)
    # Torch's second backward prefetches with the order of a forward that is over.
    same_order(make, functools.partial(forwards, count=count))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("count", [1, 2])
def test_order_of_forwards(ranks, count, reshard, checkpointed):
    ranks(2).run(order_of_forwards, count, reshard, checkpointed)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.one(x), self.two(x)


def order_of_an_unused_one():
    """Each of two backwards passes by one module."""

    def make(engine):
        model = TwoOutputs()
        for module in (model.first, model.one, model.two, model):
            engine.fully_shard(module, mesh=mesh_of(), reshard_after_forward=True)
        return model

    def step(model, number):
        one, two = (output.square().mean() for output in model(batch(number)))
        model.set_is_last_backward(False)
        two.backward(retain_graph=True)
        model.set_is_last_backward(True)
        one.backward()
        return one + two

    same_order(make, step)


def test_order_of_modules_that_one_backward_does_not_use(ranks):
    ranks(2).run(order_of_an_unused_one)


def order_of_lists(direction, ahead):
    def make(engine):
        model = sharded_net(engine, layers=4, checkpointed=True, reshard_after_forward=True)
        layers = list(model.layers) if direction == "forward" else list(model.layers)[::-1]
        for i in range(len(layers) - ahead):
            getattr(layers[i], f"set_modules_to_{direction}_prefetch")(layers[i + 1 : i + 1 + ahead])
        return model

    same_order(make, forward_and_backward)


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_order_of_prefetch_lists(ranks, direction, ahead):
    ranks(2).run(order_of_lists, direction, ahead)


def order_of_groups_in_checkpoints(explicit):
    """A group inside of each recomputed layer."""

    def make(engine):
        model = Net()
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
        for layer in model.layers:
            engine.fully_shard(layer.up, mesh=mesh_of(), reshard_after_forward=True)
            engine.fully_shard(layer, mesh=mesh_of(), reshard_after_forward=True)
        engine.fully_shard(model, mesh=mesh_of(), reshard_after_forward=True)
        for layer, before in zip(model.layers[1:], model.layers) if explicit else ():
            layer.set_modules_to_backward_prefetch([before, before.up])
        return model

    same_order(make, forward_and_backward)


@pytest.mark.parametrize("explicit", [False, True])
def test_order_of_groups_in_checkpoints(ranks, explicit):
    ranks(2).run(order_of_groups_in_checkpoints, explicit)


def order_of_several_modules():
    def make(engine):
        model = Net(5, checkpointed=True)
        engine.fully_shard(model.layers[0], mesh=mesh_of())
        engine.fully_shard([model.layers[1], model.layers[2]], mesh=mesh_of())
        engine.fully_shard([model.layers[3], model.layers[4]], mesh=mesh_of(), reshard_after_forward=False)
        return engine.fully_shard(model, mesh=mesh_of())

    same_order(make, forward_and_backward)


def test_order_of_groups_of_several_modules(ranks):
    ranks(2).run(order_of_several_modules)


class HalfUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused, self.used = nn.Linear(1, 1), nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.used(x))


def order_of_half_used_groups():
    def make(engine):
        model = nn.Sequential(HalfUsed(), HalfUsed(), nn.Linear(6, 6))
        for half in model[:2]:
            engine.fully_shard([half.unused, half.used], mesh=mesh_of(), reshard_after_forward=True)
        return engine.fully_shard(model, mesh=mesh_of())

    same_order(make, forward_and_backward)


@needs_torch_2_13
def test_order_of_groups_with_an_unused_module(ranks):
    ranks(2).run(order_of_half_used_groups)
