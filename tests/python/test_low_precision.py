"""fsdp_cpp.optim.LowPrecisionAdamW: on shards next to whole parameters, and next to torch.optim.AdamW."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from parity import mesh_of, whole
from pool import DEVICE
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_cpp
from fsdp_cpp.optim import LowPrecisionAdamW

EIGHT_BITS = torch.float8_e4m3fn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 12)).to(DEVICE, torch.bfloat16)


def set_gradients(model, step):
    """The same ones on any number of ranks."""
    for index, param in enumerate(model.parameters()):
        torch.manual_seed(100 * step + index)
        grad = torch.randn(param.shape).to(DEVICE, param.dtype)
        is_placed = isinstance(param, DTensor)
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_placed else grad


def train(model, optimizer, steps=range(3)):
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def same_rounding(moments, shape, tensor_parallel):
    model, reference = net(), net()
    if tensor_parallel:
        mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fsdp_cpp.fully_shard(model, mesh=mesh["dp"])
    else:
        fsdp_cpp.fully_shard(model, mesh=mesh_of(*shape))
    options = {"lr": 0.01, "moments": moments, "seed": 3}
    train(model, LowPrecisionAdamW(model.parameters(), **options))
    train(reference, LowPrecisionAdamW(reference.parameters(), **options))
    for one, other in zip(model.parameters(), reference.parameters()):
        assert torch.equal(whole(one), other.detach())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2), "tp"])
def test_any_number_of_ranks_rounds_alike(ranks, shape, moments):
    ranks(2 if shape == (2,) else 4).run(same_rounding, moments, shape, shape == "tp")


def test_in_fp32_it_is_adamw():
    model, reference = net().float(), net().float()
    train(model, LowPrecisionAdamW(model.parameters(), lr=0.01, moments=torch.float32))
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01, fused=True))
    for one, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(one.detach(), other.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, EIGHT_BITS], ids=str)
def test_small_updates_count_on_average(moments):
    def distance(**options):
        param = nn.Parameter(torch.ones(512, dtype=torch.bfloat16))
        optimizer = LowPrecisionAdamW([param], lr=1e-4, weight_decay=0.0, moments=moments, **options)
        for _ in range(1000):
            param.grad = torch.full_like(param, 0.5)
            optimizer.step()
        return 1 - param.double().mean().item()

    assert abs(distance() - 0.1) < 0.004
    assert distance(stochastic_rounding=False) == 0


def resume(moments):
    """Goes on from a state dict on the same ranks, to the bit."""

    def make():
        model = fsdp_cpp.fully_shard(net(), mesh=mesh_of())
        return model, LowPrecisionAdamW(model.parameters(), lr=0.01, moments=moments)

    model, optimizer = make()
    train(model, optimizer, range(2))
    weights = copy.deepcopy(model.state_dict())
    named = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    stored = io.BytesIO()
    torch.save(optimizer.state_dict(), stored)
    kept = named["state"]["0.weight"]["exp_avg"]
    assert kept.dtype == (torch.bfloat16 if moments == EIGHT_BITS else moments)
    assert kept.shape == model[0].weight.shape
    train(model, optimizer, range(2, 4))
    for load in (
        lambda again, other: set_optimizer_state_dict(again, other, named),
        lambda again, other: other.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=False)),
    ):
        again, other = make()
        again.load_state_dict(weights)
        load(again, other)
        train(again, other, range(2, 4))
        for one, two in zip(model.parameters(), again.parameters()):
            assert torch.equal(whole(one), whole(two))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16, EIGHT_BITS], ids=str)
def test_state_dicts(ranks, moments):
    ranks(2).run(resume, moments)


def test_takes_over_the_moments_of_adamw():
    model = net()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, adamw)
    optimizer = LowPrecisionAdamW(model.parameters(), moments=EIGHT_BITS)
    optimizer.load_state_dict(adamw.state_dict())
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].dtype == EIGHT_BITS
    for mine, theirs in zip(optimizer.state_dict()["state"].values(), adamw.state_dict()["state"].values()):
        assert mine["step"] == theirs["step"]
        torch.testing.assert_close(mine["exp_avg"], theirs["exp_avg"], rtol=0.07, atol=1e-4)
    train(model, optimizer)
    assert all(param.isfinite().all() for param in model.parameters())


def test_refusals_before_anything_changes():
    weight, table = nn.Parameter(torch.ones(3)), nn.Embedding(4, 3, sparse=True)
    weight.grad = torch.ones(3)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="parameter 1 of group 0 has a sparse gradient"):
        LowPrecisionAdamW([weight, table.weight]).step()
    optimizer = LowPrecisionAdamW([weight])
    optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[0]["moments"] = "float32"
    with pytest.raises(ValueError, match="parameter 0 of group 0 are in torch.bfloat16, but the option `moments` is"):
        optimizer.step()
    assert torch.equal(weight, before)
    other = torch.optim.AdamW([weight], maximize=True)
    with pytest.raises(ValueError, match="with maximize=True"):
        optimizer.load_state_dict(other.state_dict())


def test_refusals():
    half = nn.Parameter(torch.ones(3, dtype=torch.half))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="parameter 0 of group 0 is in torch.float16"):
        LowPrecisionAdamW([half]).step()
    for options, message in (
        ({"moments": torch.half}, "moments is Half, not Float, BFloat16 or Float8_e4m3fn"),
        ({"lr": -1.0}, "lr is -1, not 0 or more"),
        ({"betas": (0.9, 1.0)}, "a beta is 1, not from 0 to below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            LowPrecisionAdamW([half], **options)
