"""Parameters of every kind, with both engines: how they are stored, and which are sharded."""

import functools

import pytest
import torch
import torch.distributed as dist
from parity import ENGINES, Mlp, batch, compare, mesh_of, needs_torch_2_13, see_grads, sharded_mlps, train
from pool import DEVICE
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdp_cpp


def precision(param, reduce, output):
    def make(engine):
        policy = engine.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
        return sharded_mlps(engine, mp_policy=policy)

    compare(make)


@pytest.mark.parametrize(
    "param, reduce, output",
    [
        (torch.bfloat16, None, None),
        (torch.bfloat16, torch.float32, None),
        (torch.bfloat16, torch.float32, torch.float32),
        (None, torch.bfloat16, None),
        (torch.float16, torch.float32, None),
    ],
)
def test_mixed_precision(ranks, param, reduce, output):
    ranks(2).run(precision, param, reduce, output)


def offload():
    def make(engine):
        return sharded_mlps(engine, offload_policy=engine.CPUOffloadPolicy(pin_memory=DEVICE != "cpu"))

    compare(make)


def test_offload(ranks):
    ranks(2).run(offload)


def meta_init(then):
    def make(engine):
        with torch.device("meta"):
            model = nn.Sequential(*[Mlp() for _ in range(2)])
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of())
        engine.fully_shard(model, mesh=mesh_of())
        if then == "to_empty":
            model.to_empty(device=DEVICE)
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(torch.full_like(param, 0.1))
        else:
            full = {name: torch.full(p.shape, 0.1) for name, p in model.named_parameters()}
            placed = {
                name: torch.distributed.tensor.distribute_tensor(full[name], p.device_mesh, p.placements)
                for name, p in model.named_parameters()
            }
            model.load_state_dict(placed, assign=True)
        return model

    compare(make)


@pytest.mark.parametrize("then", ["to_empty", "assign"])
def test_meta_init(ranks, then):
    ranks(2).run(meta_init, then)


def cast_afterwards():
    def make(engine):
        return sharded_mlps(engine).to(torch.float64)

    def run(engine, model, seen):
        for step in range(2):
            loss = model(batch(step).double()).square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(make, run)
    model = sharded_mlps(ENGINES["fsdp_cpp"])
    expected = model(batch(0)).detach()
    model.to(torch.float64)  # after the first forward, which torch does not support
    torch.testing.assert_close(model(batch(0).double()).float(), expected)


def test_to_another_dtype_afterwards(ranks):
    ranks(2).run(cast_afterwards)


class Shared(nn.Module):
    """A tied weight, a frozen one, an unused one, and sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 7, bias=False)
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.second.weight
        self.frozen = nn.Linear(7, 3)
        self.unused = nn.Linear(3, 1)
        self.last = nn.Linear(3, 1)
        for param in self.frozen.parameters():
            param.requires_grad_(False)

    def forward(self, x):
        return self.last(self.frozen(self.third(torch.tanh(self.second(self.first(x))))))


def odd_parameters():
    def run(engine, model, seen):
        train(engine, model, seen)
        model.frozen.weight.requires_grad_(True)
        train(engine, model, seen, steps=1)

    compare(lambda engine: engine.fully_shard(Shared(), mesh=mesh_of()), run)


@pytest.mark.parametrize("size", [2, 4])
def test_shared_frozen_unused_and_uneven_parameters(ranks, size):
    ranks(size).run(odd_parameters)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6)  # has a second list of its parameters

    def forward(self, x):
        return self.lstm(x)[0]


def recurrent():
    def run(engine, model, seen):
        train(engine, model, seen)
        model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)
        assert all(isinstance(weight, DTensor) for weight in model.lstm._flat_weights)
        train(engine, model, seen)

    # With cuDNN, torch's engine goes on with the weights of the beginning.
    with torch.backends.cudnn.flags(enabled=False):
        compare(lambda engine: engine.fully_shard(Recurrent(), mesh=mesh_of()), run)


def test_modules_with_a_setattr_of_their_own(ranks):
    ranks(2).run(recurrent)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex64))

    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) @ self.weight).flatten(1)


def complex_parameters():
    def make(engine):
        model = nn.Sequential(Complex(), nn.Linear(6, 6))
        engine.fully_shard(model[0], mesh=mesh_of())
        return engine.fully_shard(model, mesh=mesh_of())

    compare(make, sizes=False)  # complex numbers are sent as their two parts


@needs_torch_2_13  # on a GPU
def test_complex_parameters(ranks):
    ranks(2).run(complex_parameters)


def ignored():
    def make(engine):
        model = Shared().to(DEVICE)
        kept = set(model.last.parameters())
        engine.fully_shard(model, mesh=mesh_of(), ignored_params=kept)
        assert not isinstance(model.last.weight, DTensor)
        return model

    # torch's optimizers take tensors and DTensors together only one by one.
    compare(make, functools.partial(train, foreach=False))


def test_ignored_parameters(ranks):
    ranks(2).run(ignored)


def group_of_modules(partial):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Mlp()
            self.norm = nn.LayerNorm(6)
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            x = self.norm(self.body(x))
            return x if partial else self.head(x)

    def make(engine):
        model = Model()
        engine.fully_shard(model.body, mesh=mesh_of())
        engine.fully_shard([model.norm, model.head], mesh=mesh_of())
        return engine.fully_shard(model, mesh=mesh_of())

    compare(make)


@pytest.mark.parametrize("partial", [False, True])
def test_several_modules_as_one_group(ranks, partial):
    ranks(2).run(group_of_modules, partial)


def placement():
    def by_largest_dim(param):
        dim = max(range(param.dim()), key=lambda i: param.shape[i])
        return Shard(dim - param.dim())

    compare(lambda engine: sharded_mlps(engine, shard_placement_fn=by_largest_dim))


def test_placement_function(ranks):
    ranks(2).run(placement)


def meshes_of_their_own():
    """The parameters of the middle layer are divided over two ranks, and have two replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    def make(engine):
        model = nn.Sequential(Mlp(), Mlp(), Mlp())
        special = set(model[1].parameters())
        usual = FSDPMeshInfo(mesh_of(), shard_mesh_dim=0)
        other = HSDPMeshInfo(mesh_of(2, 2), shard_mesh_dim=1, replicate_mesh_dim=0)
        return engine.fully_shard(
            model,
            mesh=mesh_of(),
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), other if p in special else usual),
        )

    compare(make)


@needs_torch_2_13
def test_parameters_with_meshes_of_their_own(ranks):
    ranks(4).run(meshes_of_their_own)


def unused_on_one_rank():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x) if dist.get_rank() == 0 else self.b(x)

    def run(engine, model, seen):
        model.set_reduce_scatter_unused_params(True)
        train(engine, model, seen)

    compare(lambda engine: engine.fully_shard(Model(), mesh=mesh_of()), run)


@needs_torch_2_13
def test_parameters_that_one_rank_does_not_use(ranks):
    ranks(2).run(unused_on_one_rank)


class Summed(nn.Linear):
    """Hooks its whole weight, as transformers' tensor parallelism does to sum gradients over its own axis."""

    def forward(self, x):
        hooked = vars(self).setdefault("hooked", [])  # in a list, which makes it no parameter of this module
        if not any(each is self.weight for each in hooked):
            self.weight.register_post_accumulate_grad_hook(lambda param: (param.grad.mul_(2), None)[1])
            hooked.append(self.weight)
        return super().forward(x)


def hooks_of_whole_parameters(microbatches, reduce_dtype):
    def make(engine):
        policy = engine.MixedPrecisionPolicy(torch.bfloat16 if reduce_dtype else None, reduce_dtype)
        model = nn.Sequential(Summed(6, 6), Summed(6, 6))
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of(), mp_policy=policy)
        return engine.fully_shard(model, mesh=mesh_of(), mp_policy=policy)

    def run(engine, model, seen):
        for step in range(3):
            for i in range(microbatches):
                model.set_requires_gradient_sync(i == microbatches - 1)
                loss = model(batch(10 * step + i)).float().square().mean()
                loss.backward()
            see_grads(model, seen, loss)
            model.zero_grad()

    compare(make, run)


@pytest.mark.parametrize("microbatches, reduce_dtype", [(1, None), (2, None), (2, torch.float32)])
def test_hooks_of_whole_parameters(ranks, microbatches, reduce_dtype):
    ranks(2).run(hooks_of_whole_parameters, microbatches, reduce_dtype)


def grad_dtypes():
    """A dtype that the gradients of shards do not have is an error."""
    model = fsdp_cpp.fully_shard(Mlp(), mesh=mesh_of())
    for param in model.parameters():
        param.grad_dtype = torch.bfloat16
    with pytest.raises(ValueError, match="has the grad_dtype BFloat16, but its gradients are in Float"):
        model(batch(0)).sum().backward()
    for param in model.parameters():
        param.grad_dtype = None
    model(batch(0)).sum().backward()


@needs_torch_2_13
def test_grad_dtype(ranks):
    ranks(2).run(grad_dtypes)


def in_inference_mode():
    """A model that is sharded, or moved, in inference mode."""
    with torch.inference_mode():
        model = sharded_mlps(fsdp_cpp)
        expected = model(batch(0))
    model(batch(0)).sum().backward()  # its parameters can be trained
    assert all(param.grad is not None for param in model.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(model.to(torch.float64)(batch(0).double()), expected.double())


def test_inference_mode(ranks):
    ranks(2).run(in_inference_mode)
