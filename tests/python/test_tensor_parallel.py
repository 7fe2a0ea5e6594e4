"""Parameters that are DTensors before fully_shard, with both engines: tensor parallelism, and meshes of up to three axes."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import ENGINES, compare, needs_torch_2_13, see_grads, whole
from pool import DEVICE
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fsdp_cpp
import fsdp_cpp.optim


def batch(step, mesh):
    """The ranks of tensor parallelism have the same."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // mesh["tp"].size())
    return torch.randn(2, 4, 8, generator=generator).to(DEVICE)


class Block(nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.checkpointed = checkpointed

    def body(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


ROWS = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


@functools.cache  # torch's engine refuses the second of two equal meshes, because DTensors keep the first
def named_mesh(shape, names):
    return dist.init_device_mesh(DEVICE, shape, mesh_dim_names=names)


def mesh_of(*shape):
    """Its first axes are of data parallelism, the last one is of tensor parallelism."""
    return named_mesh(shape, ("dp", "tp") if len(shape) == 2 else ("replicate", "dp", "tp"))


def make(mesh, plan, engine, *, checkpointed=False, **options):
    data = mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]
    model = nn.Sequential(*[Block(checkpointed) for _ in range(2)])
    model.to(DEVICE)
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        engine.fully_shard(block, mesh=data, **options)
    engine.fully_shard(model, mesh=data, **options)
    return model


def steps(mesh, engine, model, seen, accumulate=False):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for part in range(2 if accumulate else 1):
            if accumulate:
                model.set_requires_gradient_sync(part == 1)
            loss = model(batch(2 * step + part, mesh)).square().mean()
            loss.backward()
        see_grads(model, seen, loss)
        for param in model.parameters():
            seen.append((str(param.placements), param.to_local().detach().clone()))
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel(shape, options):
    mesh = mesh_of(*shape)
    compare(functools.partial(make, mesh, ROWS, **options), functools.partial(steps, mesh))


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("reshard", [True, False])
def test_columns_and_rows(ranks, shape, reshard):
    ranks(shape[0] * shape[1]).run(tensor_parallel, shape, {"reshard_after_forward": reshard})


def test_recomputed_forward(ranks):
    ranks(4).run(tensor_parallel, (2, 2), {"checkpointed": True})


def on_another_dim():
    tensor_parallel((2, 2), {"shard_placement_fn": lambda param: Shard(param.dim() - 1)})


def test_sharded_on_another_dim(ranks):
    ranks(4).run(on_another_dim)


def precise():
    return fsdp_cpp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def with_mixed_precision():
    tensor_parallel((2, 2), {"mp_policy": precise()})


def test_mixed_precision(ranks):
    ranks(4).run(with_mixed_precision)


def by_sequence(precision, accumulate):
    """Gradients of the norms are sums over the ranks of tensor parallelism, which come late."""
    mesh = mesh_of(2, 2)
    options = {"mp_policy": precise()} if precision == "bf16" else {}
    compare(functools.partial(make, mesh, SEQUENCE, **options), functools.partial(steps, mesh, accumulate=accumulate))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sequence_parallel(ranks, precision, accumulate):
    ranks(4).run(by_sequence, precision, accumulate)


def accumulated():
    mesh = mesh_of(2, 2)
    compare(functools.partial(make, mesh, ROWS), functools.partial(steps, mesh, accumulate=True))


def test_accumulation(ranks):
    ranks(4).run(accumulated)


class Wary(nn.Linear):
    """Looks at what it is given."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)


def whole_leaf():
    mesh = mesh_of(2, 2)
    for engine in ENGINES.values():
        model = nn.Sequential(Wary(8, 12), nn.Linear(12, 8)).to(DEVICE)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        before = model[0].weight.placements
        engine.fully_shard(model, mesh=mesh["dp"])
        seen = []
        model[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight))
        model(batch(0, mesh)).sum().backward()
        assert isinstance(seen[0], nn.Parameter) and seen[0].is_leaf and seen[0].requires_grad
        assert seen[0].placements == before and seen[0].shape == model[0].weight.shape
        assert seen[0].grad is None and model[0].weight.grad is not None


def test_modules_see_a_leaf(ranks):
    ranks(4).run(whole_leaf)


def with_replicas():
    mesh = mesh_of(2, 1, 2)
    compare(functools.partial(make, mesh, ROWS), functools.partial(steps, mesh))


def test_replicas(ranks):
    ranks(4).run(with_replicas)


def test_three_axes(ranks):
    ranks(8).run(tensor_parallel, (2, 2, 2), {})


class Experts(nn.Module):
    """A linear map per expert, divided over experts and columns, before a map that all ranks have."""

    def __init__(self, mesh):
        super().__init__()
        weight = torch.randn(4, 8, 6, device=DEVICE)
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0), Shard(2)]))
        self.first = nn.Linear(8, 8, device=DEVICE)

    def forward(self, x):
        return torch.einsum("bsd,edf->ebsf", self.first(x), self.weight.to_local())


def experts():
    mesh = named_mesh((1, 2, 2), ("dp", "ep", "tp"))

    def make_model(engine):
        return engine.fully_shard(Experts(mesh["ep", "tp"]), mesh=mesh["dp"])

    def run(engine, model, seen):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            loss = model(batch(step, mesh)).square().mean()
            loss.backward()
            see_grads(model, seen, loss)
            seen.append(("placements", str((model.weight.placements, model.weight.device_mesh.shape))))
            optimizer.step()
            optimizer.zero_grad()

    compare(make_model, run)


def test_experts_and_columns(ranks):
    ranks(4).run(experts)


def replicated():
    mesh = mesh_of(2, 2)

    def replicated_blocks(engine):
        model = nn.Sequential(*[Block() for _ in range(2)]).to(DEVICE)
        for block in model:
            parallelize_module(block, mesh["tp"], ROWS)
            engine.replicate(block, mesh=mesh["dp"])
        return engine.replicate(model, mesh=mesh["dp"])

    compare(replicated_blocks, functools.partial(steps, mesh))


def test_replicate(ranks):
    ranks(4).run(replicated)


def clipped():
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    model = make(mesh, ROWS, fsdp_cpp)  # some parameters on the whole mesh, others on one axis: torch clips no such
    model(batch(0, mesh)).square().mean().backward()

    def norm():
        return torch.cat([whole(param.grad).flatten() for param in model.parameters()]).norm()

    expected = norm()
    torch.testing.assert_close(fsdp_cpp.optim.clip_grad_norm_(model.parameters(), 0.01), expected)
    torch.testing.assert_close(norm(), torch.full((), 0.01, device=DEVICE), rtol=1e-4, atol=0)


def test_norms_of_gradients(ranks):
    ranks(4).run(clipped)


def saved(folder):
    mesh = mesh_of(2, 2)
    models = {}
    for which, engine in ENGINES.items():
        torch.manual_seed(len(which))
        models[which] = make(mesh, ROWS, engine)
    for source, target in [("torch", "fsdp_cpp"), ("fsdp_cpp", "torch")]:
        torch.manual_seed(1)
        steps(mesh, ENGINES[source], models[source], [])
        dcp.save(models[source].state_dict(), checkpoint_id=f"{folder}/{source}")
        loaded = models[target].state_dict()
        dcp.load(loaded, checkpoint_id=f"{folder}/{source}")
        models[target].load_state_dict(loaded)
        for (name, expected), value in zip(models[source].state_dict().items(), models[target].state_dict().values()):
            assert torch.equal(whole(expected), whole(value)), name
        x = batch(7, mesh)
        assert torch.equal(models[source](x), models[target](x))


def test_checkpoints_of_the_other_engine(ranks, tmp_path):
    ranks(4).run(saved, str(tmp_path))


def on_the_whole_mesh(shape, names, dims):
    """`dims` are the axes of data parallelism in the mesh of the parameters."""
    mesh = named_mesh(shape, names)
    plan = {"up.weight": 0, "up.bias": 0, "down.weight": 1}

    def make_model(engine):
        model = nn.Sequential(*[Block() for _ in range(2)]).to(DEVICE)
        for block in model:
            for name, module in block.named_modules():
                for key, param in list(module._parameters.items()):
                    placements = [Replicate()] * mesh.ndim
                    if (dim := plan.get(f"{name}.{key}")) is not None:
                        placements[names.index("tp")] = Shard(dim)
                    module._parameters[key] = nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
            engine.fully_shard(block, mesh=mesh, dp_mesh_dims=fsdp_cpp.DataParallelMeshDims(**dims))
        return engine.fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp_cpp.DataParallelMeshDims(**dims))

    def run(engine, model, seen):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(3):
            x = distribute_tensor(batch(step, mesh), mesh, [Replicate()] * mesh.ndim)
            loss = model(x).square().mean()
            loss.backward()
            see_grads(model, seen, loss.full_tensor())
            for param in model.parameters():
                seen.append((str((param.placements, param.device_mesh.shape)), param.to_local().detach().clone()))
            optimizer.step()
            optimizer.zero_grad()

    compare(make_model, run)


@needs_torch_2_13
@pytest.mark.parametrize(
    "shape, names, dims",
    [
        ((2, 2), ("data", "tp"), {"shard": "data"}),
        ((2, 2), ("data", "tp"), {"replicate": "data"}),
        ((2, 1, 2), ("copies", "shard", "tp"), {"shard": "shard", "replicate": "copies"}),
        ((2, 1, 2), ("shard", "context", "tp"), {"shard": ("shard", "context")}),
    ],
    ids=["shard", "replicate", "both", "two axes"],
)
def test_axes_of_the_mesh_of_the_parameters(ranks, shape, names, dims):
    ranks(4).run(on_the_whole_mesh, shape, names, dims)
