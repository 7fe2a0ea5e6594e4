"""fsdp_cpp.optim next to torch.optim."""

import math

import pytest
import torch
from parity import batch, mesh_of, sharded_mlps, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import fsdp_cpp
import fsdp_cpp.optim


def optimizers(clip):
    """fsdp_cpp.optim does what torch.optim does with DTensors, and its state dicts are the same."""
    results = []
    for kind in (torch.optim.AdamW, fsdp_cpp.optim.AdamW):
        torch.manual_seed(0)
        model = sharded_mlps(fsdp_cpp)
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True, fused=True)
        clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ if kind is torch.optim.AdamW else fsdp_cpp.optim.clip_grad_norm_
        norms = []
        for step in range(3):
            model(batch(step)).square().mean().backward()
            if clip:
                norms.append(whole(clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        results.append((model.state_dict(), get_optimizer_state_dict(model, optimizer), norms))
    (params, state, norms), (own_params, own_state, own_norms) = results
    assert len(norms) == len(own_norms)
    for expected, norm in zip(norms, own_norms):
        torch.testing.assert_close(norm, expected)
    for name, param in params.items():
        torch.testing.assert_close(whole(own_params[name]), whole(param), rtol=0, atol=0 if not clip else 1e-6)
    assert state["param_groups"] == own_state["param_groups"]
    assert state["state"].keys() == own_state["state"].keys()
    for name, values in state["state"].items():
        for key, value in values.items():
            own = own_state["state"][name][key]
            assert type(own) is type(value) and getattr(own, "placements", 0) == getattr(value, "placements", 0)
            torch.testing.assert_close(whole(own), whole(value), rtol=0, atol=0 if not clip else 1e-6)


@pytest.mark.parametrize("clip", [False, True])
def test_optimizer(ranks, clip):
    ranks(2).run(optimizers, clip)


def partial_sums():
    """The norm of a sum is not that of its terms."""
    mesh = mesh_of()
    norms, grads = [], []
    for clip in (torch.nn.utils.clip_grad_norm_, fsdp_cpp.optim.clip_grad_norm_):
        torch.manual_seed(0)
        params = [nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])) for _ in range(2)]
        for param in params:
            terms = torch.arange(12.0).view(4, 3) + mesh.get_local_rank()
            param.grad = DTensor.from_local(terms.to(param.device), mesh, [Partial()])
        norms.append(whole(clip(params, 1.0)))
        grads.append([whole(param.grad) for param in params])
    torch.testing.assert_close(norms[1], norms[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_clipping_partial_sums(ranks):
    ranks(2).run(partial_sums)


def complex_parameters():
    results = []
    for kind in (torch.optim.AdamW, fsdp_cpp.optim.AdamW):
        params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.complex64, torch.float32)]
        optimizer = kind([{"params": [param]} for param in params], lr=0.1)
        for step in range(3):
            for param in params:
                param.grad = torch.full_like(param, step + 1)
            optimizer.step()
        results.append([param.detach() for param in params])
    torch.testing.assert_close(results[1], results[0])


def test_complex_parameters(ranks):
    ranks(2).run(complex_parameters)


def steps_count(dtype, device):
    """The number of steps is exact, whatever new tensors are by default."""
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        for kind in (fsdp_cpp.optim.AdamW, fsdp_cpp.optim.LowPrecisionAdamW):
            param = nn.Parameter(torch.ones(4, dtype=torch.float32, device="cpu"))
            optimizer = kind([param], lr=1e-3)
            for _ in range(300):
                param.grad = torch.ones(4, dtype=torch.float32, device="cpu")
                optimizer.step()
            assert optimizer.state[param]["step"].item() == 300, kind
            assert math.isclose(param[0].item(), 0.7 * (1 - 1e-5) ** 300, rel_tol=1e-2)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype, device", [(torch.bfloat16, "cpu"), (torch.float32, "meta")])
def test_steps_are_counted_exactly(ranks, dtype, device):
    ranks(2).run(steps_count, dtype, device)
