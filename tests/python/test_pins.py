"""What PyTorch's own tests read from FSDP2's private Python, seen from outside, with both engines.

docs/python.md lists those tests. Profiles tell in which order modules are gathered and freed.
"""

import functools

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from parity import ENGINES, Collectives, Mlp, batch, compare, mesh_of, needs_torch_2_13, see_grads, train, whole
from pool import DEVICE
from torch import nn
from torch.distributed._composable import replicate as ddp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import fsdp_cpp

PHASES = {
    "root_pre_forward",
    "pre_forward",
    "all_gather",
    "pre_backward",
    "post_backward_reshard",
    "root_post_backward_callback",
}


def profiled():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


def order(profile, phases=PHASES):
    """The phases of all modules in order of time, such as 'all_gather (layers.0)'."""
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name.removeprefix("FSDP::") for event in events if event.name.startswith("FSDP::")]
    return [name for name in names if name.split()[0] in phases]


def whole_ones(model):
    return [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]


def same_order(make, step, reductions=True):
    """`step(model, number)` does one step. Which parameters each forward leaves whole is compared, too.

    `reductions` says that each module that is freed in backward has gradients to reduce.
    """
    phases = PHASES | {"post_backward_reduce"} if reductions else PHASES

    def run(engine, model, seen):
        for name, module in model.named_modules():
            if isinstance(module, torch_fsdp.FSDPModule):
                module.register_forward_hook(lambda *_, name=name: seen.append((f"after {name}", whole_ones(model))))
        for number in range(3):
            with profiled() as profile:
                loss = step(model, number)
            assert order(profile)
            seen.append(("order", order(profile, phases)))
            see_grads(model, seen, loss)
            model.zero_grad()

    compare(make, run)


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


def order_of_forwards(count, reshard, checkpointed):
    def step(model, number):
        loss = sum(model(batch(number + i)) for i in range(count)).square().mean()
        loss.backward()
        return loss

    make = functools.partial(sharded_net, checkpointed=checkpointed, reshard_after_forward=reshard)
    same_order(make, step, reductions=count == 1)


@pytest.mark.parametrize("reshard, checkpointed", [(True, False), (True, True), (False, False), (None, False)])
@pytest.mark.parametrize("count", [1, 2])
def test_order_of_one_and_two_forwards(ranks, count, reshard, checkpointed):
    ranks(2).run(order_of_forwards, count, reshard, checkpointed)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.one(x), self.two(x)


def order_of_two_backwards():
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

    same_order(make, step, reductions=False)


def test_order_of_two_backwards_that_each_leave_out_a_module(ranks):
    ranks(2).run(order_of_two_backwards)


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


def order_in_checkpoints(with_lists):
    def make(engine):
        model = Net()
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
            for module in (layer.up, model.layers[i]):
                engine.fully_shard(module, mesh=mesh_of(), reshard_after_forward=True)
        engine.fully_shard(model, mesh=mesh_of(), reshard_after_forward=True)
        for layer, before in zip(model.layers[1:], model.layers) if with_lists else ():
            layer.set_modules_to_backward_prefetch([before, before.up])
        return model

    same_order(make, forward_and_backward)


@pytest.mark.parametrize("with_lists", [False, True])
def test_order_of_groups_inside_of_checkpointed_layers(ranks, with_lists):
    ranks(2).run(order_in_checkpoints, with_lists)


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


def only_biases(reshard, checkpointed, frozen_before):
    """They alone are reduced, each group's in backward as soon as it is through."""

    def freeze(model):
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)

    def make(engine):
        model = Net(checkpointed=checkpointed)
        if frozen_before:
            freeze(model)
        for module in (*model.layers, model):
            engine.fully_shard(module, mesh=mesh_of(), reshard_after_forward=reshard)
        freeze(model)
        return model

    same_order(make, forward_and_backward)


@pytest.mark.parametrize(
    "reshard, checkpointed, frozen_before", [(True, False, False), (True, True, True), (False, False, True)]
)
def test_only_biases_are_trained(ranks, reshard, checkpointed, frozen_before):
    ranks(2).run(only_biases, reshard, checkpointed, frozen_before)


def frozen_groups(reshard):
    """Every other group is frozen, until the last step. The second step has no backward.

    Without gradients fsdp_cpp also frees with reshard_after_forward=False, and torch's engine does not.
    """

    def make(engine):
        model = nn.Sequential(*[Mlp() for _ in range(6)])
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of(), reshard_after_forward=reshard)
        return model

    def step(model, number):
        for layer in model[::2]:
            layer.requires_grad_(number == 2)
        if number == 1 and reshard:
            with torch.no_grad():
                return model(batch(number)).square().mean()
        return forward_and_backward(model, number)

    same_order(make, step, reductions=False)


@pytest.mark.parametrize("reshard", [True, False])
def test_groups_that_are_frozen_for_a_while(ranks, reshard):
    ranks(2).run(frozen_groups, reshard)


def one_rank():
    """It sums and does not average, and has nobody to talk to."""
    results = []
    for engine in (None, *ENGINES.values()):
        torch.manual_seed(0)
        model, seen = Mlp().to(DEVICE), []
        if engine is not None:
            engine.fully_shard(model, mesh=mesh_of(), reshard_after_forward=False)
        with Collectives() as recorded:
            train(engine, model, seen)
        assert engine is not fsdp_cpp or not recorded.calls
        results.append([whole(value) for _, value in seen] + [whole(param) for param in model.parameters()])
    for plain, theirs, ours in zip(*results, strict=True):
        assert torch.equal(ours, plain) and torch.equal(theirs, plain)


def test_one_rank_trains_as_without_sharding(ranks):
    ranks(1).run(one_rank)


def inner_and_outer(engine):
    model = nn.Sequential(Mlp(), Mlp())
    for module in (model[0].up, model[0].down, model):
        engine.fully_shard(module, mesh=mesh_of())
    return model


def the_root(engine_name):
    """The module that runs first is the root. Names begin there."""
    engine = ENGINES[engine_name]
    model = inner_and_outer(engine)
    left_whole = []
    model.register_forward_hook(lambda *_: left_whole.extend(whole_ones(model)))
    with profiled() as profile:
        model(batch(0)).sum().backward()
    of_forward = ["root_pre_forward", "all_gather", "all_gather (0.up)", "all_gather (0.down)"]
    assert order(profile, {"root_pre_forward", "all_gather"})[:4] == of_forward
    assert order(profile, {"root_pre_forward"}) == ["root_pre_forward"]
    assert left_whole == ["1.up.weight", "1.up.bias", "1.down.weight", "1.down.bias"]  # only a root leaves them so

    model = inner_and_outer(engine)
    model[0].up(batch(0))
    with pytest.raises(RuntimeError, match="lazily initialized for 0.up"):
        model(batch(0))
    model = nn.Sequential(Mlp(), Mlp())
    engine.fully_shard(list(model), mesh=mesh_of())
    with pytest.raises(RuntimeError, match="requires a single root module"):
        model(batch(0))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_root_and_its_names(ranks, engine):
    ranks(2).run(the_root, engine)


class Buffered(Mlp):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))


def left_to_others(engine_name):
    """A call of fully_shard leaves modules alone that an inner call or DDP's replicate has."""
    engine = ENGINES[engine_name]
    model = nn.Sequential(*[Buffered() for _ in range(3)])
    ddp(model[0])
    engine.fully_shard(model[2], mesh=mesh_of())
    model[2].kept = model[2].kept.cpu()
    engine.fully_shard(model, mesh=mesh_of())
    plain = [f"0.{name}" for name, _ in model[0].named_parameters()]
    assert whole_ones(model) == plain
    model.unshard()  # its group
    assert whole_ones(model) == plain + [f"1.{name}" for name, _ in model[1].named_parameters()]
    model.reshard()
    assert whole_ones(model) == plain
    assert [layer.kept.device.type for layer in model] == ["cpu", DEVICE, "cpu"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_left_to_other_calls(ranks, engine):
    ranks(2).run(left_to_others, engine)


def cast_before_the_first_forward():
    """The dtype of reductions is that of the policy, whatever the parameters were."""

    def make(engine):
        policy = engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = nn.Sequential(Mlp(), Mlp()).to(torch.bfloat16)
        for module in (*model, model):
            engine.fully_shard(module, mesh=mesh_of(), mp_policy=policy)
        return model.to(torch.float32)

    compare(make)


def test_dtype_of_reductions_after_a_cast(ranks):
    ranks(2).run(cast_before_the_first_forward)


def uneven(dim):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(DEVICE)
    return model, lambda param: Shard(min(dim, param.dim() - 1))


def uneven_shards_of_other_dims():
    """Torch's engine refuses them."""
    model, placement = uneven(1)
    with pytest.raises(NotImplementedError, match="does not support uneven sharding on dim 1"):
        ENGINES["torch"].fully_shard(model, mesh=mesh_of(), shard_placement_fn=placement)
    results = []
    for dim in (0, 1):
        torch.manual_seed(0)
        model, placement = uneven(dim)
        seen: list = []
        train(fsdp_cpp, fsdp_cpp.fully_shard(model, mesh=mesh_of(), shard_placement_fn=placement), seen)
        assert model[1].weight.placements == (Shard(dim),)
        results.append([value for _, value in seen] + [whole(param) for param in model.parameters()])
    for expected, value in zip(*results, strict=True):
        assert torch.equal(expected, value)


def test_uneven_shards_of_other_dims(ranks):
    ranks(2).run(uneven_shards_of_other_dims)
