"""fsdp_cpp.optim.Muon on shards next to torch.optim.Muon on whole matrices."""

import copy
import io
import unittest.mock

import pytest
import torch
import torch.distributed as dist
from parity import mesh_of, whole
from pool import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_cpp
from fsdp_cpp.optim import Muon


class Net(nn.Module):
    """Tall, wide and square matrices, of which some ranks have more rows, or none."""

    def __init__(self, width=13):
        super().__init__()
        torch.manual_seed(0)
        self.rise = nn.Linear(6, width)
        self.fall = nn.Linear(width, 6)
        self.turn = nn.Linear(6, 6)
        self.end = nn.Linear(6, 1)

    def forward(self, x):
        return self.end(self.turn(self.fall(self.rise(x).tanh())).tanh())


def groups(model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    return matrices, vectors


def in_float():
    """torch.optim.Muon without its rounding to bf16, which the iteration makes up to 480 times larger."""
    return unittest.mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.to(torch.float32, copy=True))


def train(model, reference, steps=4, batch_seed=None, **options):
    """Steps both, and compares every parameter."""
    mine = Muon(
        [{"params": groups(model)[0]}, {"params": groups(model)[1], "adamw": True, "lr": 0.01}],
        ns_dtype=torch.float32,
        **options,
    )
    theirs = torch.optim.Muon(groups(reference)[0], **options)
    vectors = torch.optim.AdamW(groups(reference)[1], lr=0.01, weight_decay=options.get("weight_decay", 0.1))
    seed = dist.get_rank() if batch_seed is None else batch_seed
    for step in range(steps):
        torch.manual_seed(100 * step + seed)
        x = torch.randn(4, 6, device=DEVICE)
        for each in (model, reference):
            each.zero_grad()
            each(x).square().sum().backward()
        for param in reference.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        mine.step()
        vectors.step()
        with in_float():
            theirs.step()
        for (name, one), other in zip(model.named_parameters(), reference.parameters()):
            torch.testing.assert_close(whole(one), other.detach(), atol=2e-5, rtol=0, msg=lambda m: f"{name}: {m}")


def sharded(shape, options):
    model = Net().to(DEVICE)
    reference = copy.deepcopy(model)
    mesh = mesh_of(*shape)
    for layer in model.children():
        fsdp_cpp.fully_shard(layer, mesh=mesh)
    fsdp_cpp.fully_shard(model, mesh=mesh)
    train(model, reference, **options)


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.02}, {"lr": 0.02, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}],
    ids=["defaults", "options"],
)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
def test_equals_torch(ranks, shape, options):
    ranks(2 if shape == (2,) else 4).run(sharded, shape, options)


def plain():
    model = Net().to(DEVICE)
    train(model, copy.deepcopy(model), lr=0.02, batch_seed=0)


def test_plain_parameters(ranks):
    ranks(2).run(plain)


def in_bf16():
    """With the rounding of torch.optim.Muon, for gradients whose singular values are all the same."""
    model = fsdp_cpp.fully_shard(nn.Linear(24, 16, bias=False, device=DEVICE), mesh=mesh_of())
    reference = nn.Parameter(whole(model.weight))
    mine, theirs = Muon(model.parameters(), lr=0.02), torch.optim.Muon([reference], lr=0.02)
    torch.manual_seed(0)
    grad = nn.init.orthogonal_(torch.empty(16, 24)).to(DEVICE)
    model.weight.grad = distribute_tensor(grad, model.weight.device_mesh, [Shard(0)])
    reference.grad = grad.clone()
    mine.step()
    theirs.step()
    torch.testing.assert_close(whole(model.weight), reference.detach(), atol=0.02 * 2**-8, rtol=0)


def test_in_bf16(ranks):
    ranks(4).run(in_bf16)


def tensor_parallel():
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(12).to(DEVICE)  # which torch can divide by two
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"rise": ColwiseParallel(), "fall": RowwiseParallel()})
    for layer in (model.rise, model.fall):
        fsdp_cpp.fully_shard(layer, mesh=mesh["dp"])
    fsdp_cpp.fully_shard(model, mesh=mesh["dp"])
    train(model, reference, lr=0.02, batch_seed=dist.get_rank() // 2)


def test_tensor_parallel(ranks):
    ranks(4).run(tensor_parallel)


def stack_and_heads():
    """Three dims are a stack, blocks are heads: as many matrices by themselves."""
    torch.manual_seed(0)
    experts, heads = torch.randn(5, 6, 4, device=DEVICE), torch.randn(8, 3, device=DEVICE)
    model = nn.Module()
    model.experts, model.heads = nn.Parameter(experts.clone()), nn.Parameter(heads.clone())
    model.forward = lambda: (model.experts.sin() * model.experts).sum() + (model.heads.sin() * model.heads).sum()
    singles = [nn.Parameter(each.clone()) for each in (*experts, *heads.chunk(4))]
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    mine = Muon(
        [{"params": [model.experts]}, {"params": [model.heads], "blocks": 4}], lr=0.02, ns_dtype=torch.float32
    )
    mine.set_exchange_numel(1)
    theirs = torch.optim.Muon(singles, lr=0.02)
    for _ in range(3):
        model().backward()
        sum((each.sin() * each).sum() for each in singles).backward()
        mine.step()
        with in_float():
            theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    torch.testing.assert_close(whole(model.experts), torch.stack(singles[:5]).detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(whole(model.heads), torch.cat(singles[5:]).detach(), atol=2e-5, rtol=0)


def test_stack_and_heads(ranks):
    ranks(4).run(stack_and_heads)


def state_dicts():
    def make():
        model = fsdp_cpp.fully_shard(Net().to(DEVICE), mesh=mesh_of())
        matrices, vectors = groups(model)
        optimizer = Muon([{"params": matrices, "lr": 0.02}, {"params": vectors, "adamw": True}], ns_dtype=torch.float32)
        return model, optimizer

    def step(model, optimizer, seed):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(4, 6, device=DEVICE)).sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    named = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    assert type(named["state"]["rise.weight"]["momentum_buffer"]) is type(model.rise.weight.grad)
    weights = {name: whole(value) for name, value in model.state_dict().items()}
    step(model, optimizer, 1)
    for load in (
        lambda model, optimizer: optimizer.load_state_dict(state),
        lambda model, optimizer: set_optimizer_state_dict(model, optimizer, named),
    ):
        again, other = make()
        for name, param in again.named_parameters():
            local = distribute_tensor(weights[name], param.device_mesh, param.placements)
            with torch.no_grad():
                param.copy_(local)
        load(again, other)
        step(again, other, 1)
        for one, two in zip(model.parameters(), again.parameters()):
            torch.testing.assert_close(whole(one), whole(two), atol=1e-6, rtol=0)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)


def test_state_dicts(ranks):
    ranks(2).run(state_dicts)


def refused():
    matrix = nn.Parameter(torch.zeros(6, 4))
    for options, message in [
        ({"lr": -1}, "lr is -1, not 0 or more"),
        ({"ns_steps": 100}, "ns_steps is 100"),
        ({"blocks": 0}, "blocks is 0"),
        ({"betas": (1.5, 2)}, "a beta is 1.5"),
        ({"ns_dtype": torch.int32}, "ns_dtype is Int, not BFloat16"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn is 'other'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Muon([matrix], **options)
        optimizer = Muon([nn.Parameter(torch.zeros(1))])
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [matrix], **options})
        assert len(optimizer.param_groups) == 1
    matrix.grad = torch.ones(6, 4)
    with pytest.raises(ValueError, match="parameter 1 of group 0 has 6 rows, which 5 blocks cannot share"):
        Muon([nn.Parameter(torch.zeros(5, 5)), matrix], blocks=5).step()
    matrix.grad = matrix.grad.to_sparse()
    optimizer = Muon([matrix])
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    matrix.grad = matrix.grad.to_dense()
    optimizer.step()
    optimizer.param_groups[0]["adamw"] = True  # from now on
    optimizer.step()

    model = fsdp_cpp.fully_shard(Net().to(DEVICE), mesh=mesh_of())
    optimizer = Muon(groups(model)[0])
    for step in range(2):
        model.zero_grad()
        model(torch.randn(4, 6, device=DEVICE)).sum().backward()
        if step == 0:
            optimizer.step()
    if dist.get_rank() == 1:
        model.turn.weight.grad = None
    with pytest.raises(ValueError, match="parameter 2 of group 0 has a gradient on rank 0 and none on rank 1"):
        optimizer.step()
    if dist.get_rank() == 1:
        model.zero_grad()
    with pytest.raises(ValueError, match="parameter 0 of group 0 has a gradient on rank 0 and none on rank 1"):
        optimizer.step()


def test_refused(ranks):
    ranks(2).run(refused)


def partial_gradient():
    """The gradient of a replicated weight whose input is sharded is a sum that is not complete."""
    mesh = mesh_of()
    model = distribute_module(nn.Linear(6, 4, bias=False, device=DEVICE), mesh)
    for optimizer in (Muon(model.parameters()), fsdp_cpp.optim.AdamW(model.parameters())):
        model.zero_grad()
        x = distribute_tensor(torch.randn(4, 6, device=DEVICE), mesh, [Shard(0)])
        model(x).sum().backward()
        with pytest.raises(ValueError, match="parameter 0 of group 0 has the placements .*Replicate.*Partial"):
            optimizer.step()


def test_partial_gradient(ranks):
    ranks(2).run(partial_gradient)


def two_meshes():
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("x", "y"))
    model = Net().to(DEVICE)
    reference = copy.deepcopy(model)
    fsdp_cpp.fully_shard(model.rise, mesh=mesh["y"])
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    train(model, reference, lr=0.02, batch_seed=0)


def test_two_meshes(ranks):
    ranks(4).run(two_meshes)


def checkpoint(path):
    def make():
        model = fsdp_cpp.fully_shard(Net().to(DEVICE), mesh=mesh_of())
        optimizer = Muon([{"params": groups(model)[0]}, {"params": groups(model)[1], "adamw": True}], lr=0.02)
        model(torch.ones(4, 6, device=DEVICE)).sum().backward()
        return model, optimizer

    model, optimizer = make()
    optimizer.step()
    fsdp_cpp.save(get_optimizer_state_dict(model, optimizer), path)
    other, loaded = make()
    loaded.step()
    loaded.step()
    state = get_optimizer_state_dict(other, loaded)
    fsdp_cpp.load(state, path)
    set_optimizer_state_dict(other, loaded, state)
    for one, two in zip(model.parameters(), other.parameters()):
        for name, value in optimizer.state[one].items():
            torch.testing.assert_close(whole(loaded.state[two][name]), whole(value))
    # Of a plain torch.optim.Muon, whose options are fewer.
    plain = nn.Parameter(torch.zeros(8, 4))
    mine, theirs = Muon([{"params": [plain], "blocks": 4, "adamw": True}]), torch.optim.Muon([plain], lr=0.5)
    mine.load_state_dict(theirs.state_dict())
    group = mine.param_groups[0]
    assert (group["blocks"], group["adamw"], group["lr"]) == (4, True, 0.5)


def test_checkpoint(ranks, tmp_path):
    ranks(2).run(checkpoint, str(tmp_path / "checkpoint"))
