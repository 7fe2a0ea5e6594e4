"""Optimizers that step in backward, and budgets of device memory, next to plain training."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from parity import batch, mesh_of, whole
from pool import DEVICE
from torch import nn

import fsdp_cpp
import fsdp_cpp.observe
import fsdp_cpp.optim
from fsdp_cpp.offload import CPUOffloadPolicy, DeviceBudget, StepInBackward


class Net(nn.Module):
    """Layers, of which each runs `rounds` times."""

    def __init__(self, rounds=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.rounds = rounds

    def forward(self, x):
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x).tanh()
        return self.head(x)


def sharded(policy=None, shape=(), rounds=1):
    model = Net(rounds).to(DEVICE)
    options = {"mesh": mesh_of(*shape)} | ({"offload_policy": policy} if policy else {})
    for layer in model.layers:
        fsdp_cpp.fully_shard(layer, **options)
    return fsdp_cpp.fully_shard(model, **options)


def offloaded():
    return CPUOffloadPolicy(pin_memory=DEVICE != "cpu")


OPTIMIZERS = {
    "AdamW": lambda params: fsdp_cpp.optim.AdamW(params, lr=1e-2),
    "torch's AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "LowPrecisionAdamW": lambda params: fsdp_cpp.optim.LowPrecisionAdamW(params, lr=1e-2),
}


def groups_of(model):
    matrices = [param for param in model.parameters() if param.ndim == 2]
    vectors = [param for param in model.parameters() if param.ndim == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 1e-3}]


def expect_same(model, other):
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(one), whole(two), rtol=0, atol=0, msg=lambda text: f"{name}: {text}")
        assert one.grad is None, name


def train_both(model, other, make, parts=1, steps=4):
    optimizer, after = make(groups_of(model)), make(groups_of(other))
    with StepInBackward(model, optimizer) as updates:
        for step in range(steps):
            for each in (model, other):
                for part in range(parts):
                    each.set_is_last_backward(part == parts - 1)
                    each(batch(parts * step + part)).square().sum().backward()
            updates.finish()
            after.step()
            after.zero_grad()
            expect_same(model, other)
    model(batch(0)).sum().backward()  # nobody steps now
    assert all(param.grad is not None for param in model.parameters())


def train_with_each_policy(name, rounds):
    for policy in (offloaded, lambda: None, lambda: CPUOffloadPolicy(offloaded().pin_memory, DeviceBudget(1000))):
        train_both(sharded(policy(), rounds=rounds), sharded(policy(), rounds=rounds), OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("rounds", [1, 2])
def test_steps_in_backward_as_after_it(ranks, name, rounds):
    ranks(2).run(train_with_each_policy, name, rounds)


def train_with_replicas():
    train_both(sharded(offloaded(), (2, 2)), sharded(offloaded(), (2, 2)), OPTIMIZERS["AdamW"], parts=3)


def test_steps_in_backward_with_replicas_and_microbatches(ranks):
    ranks(4).run(train_with_replicas)


def change_gradients():
    model, other = sharded(offloaded()), sharded(offloaded())
    optimizer, after = OPTIMIZERS["SGD"](groups_of(model)), OPTIMIZERS["SGD"](groups_of(other))
    seen, threads = [], set()

    def halve(params):
        threads.add(threading.current_thread().name)
        for param in params:
            seen.append(param)
            param.grad /= 2

    with StepInBackward(model, optimizer, halve) as updates:
        for each in (model, other):
            each(batch(0)).square().sum().backward()
        updates.finish()
    for param in other.parameters():
        param.grad /= 2
    after.step()
    after.zero_grad()
    expect_same(model, other)
    assert set(seen) == set(model.parameters())
    assert len(seen) == len(set(seen))
    assert threads == {"StepInBackward"}  # all of them are on the host


def test_before_update_sees_and_changes_gradients(ranks):
    ranks(2).run(change_gradients)


def raise_errors():
    model = sharded(offloaded())
    with pytest.raises(ValueError, match="Muon cannot step on some parameters alone"):
        StepInBackward(model, fsdp_cpp.optim.Muon([model.head.weight]))
    with pytest.raises(ValueError, match="LBFGS cannot step on some parameters alone"):
        StepInBackward(model, torch.optim.LBFGS(model.parameters()))

    def fail(params):
        raise RuntimeError("as asked")

    with pytest.raises(ValueError, match="the optimizer has no parameter of the module; make it after fully_shard"):
        StepInBackward(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Linear is not sharded; call fully_shard first"):
        plain = nn.Linear(2, 2)
        StepInBackward(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    with StepInBackward(model, optimizer, fail) as updates:
        with pytest.raises(ValueError, match="have a hook already"):
            StepInBackward(model, optimizer)
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match="as asked"):
            updates.finish()
    assert all(param.grad is None for param in model.parameters())
    with pytest.warns(UserWarning, match="finish.. was not called"), StepInBackward(model, optimizer):
        model(batch(0)).sum().backward()
        with pytest.raises(RuntimeError, match=r"clip_grad_norm_. the parameters are still being updated"):
            fsdp_cpp.optim.clip_grad_norm_(model.parameters(), 1)
        for use in (optimizer.step, optimizer.state_dict, model.state_dict):
            with pytest.raises(RuntimeError, match=r"call its finish\(\) after backward, before (the opt|state_dict)"):
                use()
        for use in (lambda: model(batch(0)), model.reshard):
            with pytest.raises(RuntimeError, match="is still being updated by the StepInBackward"):
                use()
    with pytest.raises(ValueError, match="neither may be negative"):
        DeviceBudget(-1)


def test_errors(ranks):
    ranks(2).run(raise_errors)


def refuse_a_second_backward():
    model = sharded(offloaded())
    # The update of one rank takes longer than that of the other, which must not matter.
    pause = 0.05 * dist.get_rank()
    with StepInBackward(model, OPTIMIZERS["SGD"](model.parameters()), lambda params: time.sleep(pause)) as updates:
        one, two = model(batch(0)).sum(), model(batch(1)).sum()
        one.backward()
        with pytest.raises(RuntimeError, match="is still being updated by the StepInBackward"):
            two.backward()
        updates.discard()
        model(batch(2)).sum().backward()
        updates.finish()


def test_all_ranks_refuse_a_second_backward(ranks):
    ranks(2).run(refuse_a_second_backward)


def change_gradients_too_late():
    for change in ("clears", "clips"):
        model = sharded(offloaded())
        optimizer = OPTIMIZERS["SGD"](model.parameters())
        is_changed = threading.Event()

        def wait(params, model=model, is_changed=is_changed):
            if not any(param is model.head.weight for param in params):  # the head is the last one
                is_changed.wait()

        with StepInBackward(model, optimizer, wait) as updates:
            model(batch(0)).sum().backward()
            if change == "clears":
                optimizer.zero_grad()
            else:
                model.head.weight.grad.mul_(0.5)
            is_changed.set()
            with pytest.raises(RuntimeError, match="was changed or cleared between backward and finish"):
                updates.finish()


def test_says_who_changed_a_gradient(ranks):
    ranks(2).run(change_gradients_too_late)


def share_a_budget():
    policy = CPUOffloadPolicy(budget=1000)
    assert copy.deepcopy(policy).budget is policy.budget
    assert policy.budget.take(600)
    assert pickle.loads(pickle.dumps(policy)).budget.left() == 400


def test_copies_share_a_budget(ranks):
    ranks(2).run(share_a_budget)


def add_parameters_late():
    model = sharded(offloaded())
    *first, last = model.parameters()
    optimizer = OPTIMIZERS["AdamW"](first)
    with StepInBackward(model, optimizer) as updates:
        optimizer.add_param_group({"params": [last]})
        model(batch(0)).sum().backward()
        with pytest.raises(ValueError, match="make a StepInBackward after its parameter groups are complete"):
            updates.finish()


def test_says_that_parameters_came_too_late(ranks):
    ranks(2).run(add_parameters_late)


def fail_in_backward():
    model, other = sharded(offloaded()), sharded(offloaded())
    optimizer, after = OPTIMIZERS["SGD"](groups_of(model)), OPTIMIZERS["SGD"](groups_of(other))
    fails = True

    def fail(grad):
        if fails:
            raise RuntimeError("as asked")

    def fail_at_the_first_layer(module, args, output):
        output.register_hook(fail)

    model.layers[0].register_forward_hook(fail_at_the_first_layer)
    updates = StepInBackward(model, optimizer)
    with pytest.raises(RuntimeError, match="as asked"):
        model(batch(0)).sum().backward()
    updates.discard()
    assert all(param.grad is None for param in model.parameters())
    fails = False
    with torch.no_grad():
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.copy_(two)
    optimizer.load_state_dict(after.state_dict())
    for step in range(2):
        for each in (model, other):
            each(batch(step)).square().sum().backward()
        updates.finish()
        after.step()
        after.zero_grad()
        expect_same(model, other)
    updates.close()


def test_goes_on_from_a_checkpoint_after_an_error(ranks):
    ranks(2).run(fail_in_backward)


def forget_updates():
    model = sharded(offloaded())
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    updates = weakref.ref(StepInBackward(model, optimizer))
    assert updates() is None  # nobody held it
    held = StepInBackward(model, optimizer)
    for step in range(2):
        model(batch(step)).sum().backward()
        held.finish()
    assert "StepInBackward" in {thread.name for thread in threading.enumerate()}
    held = weakref.ref(held)
    model = weakref.ref(model)
    del optimizer
    gc.collect()
    assert held() is None and model() is None
    assert "StepInBackward" not in {thread.name for thread in threading.enumerate()}


def test_is_freed_without_close(ranks):
    ranks(2).run(forget_updates)


EXITS_DURING_AN_UPDATE = """
import time, torch, torch.distributed as dist, fsdp_cpp
from fsdp_cpp.offload import StepInBackward
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp_cpp.fully_shard(torch.nn.Linear(4, 4), offload_policy=fsdp_cpp.CPUOffloadPolicy(pin_memory=False))
updates = StepInBackward(model, torch.optim.AdamW(model.parameters()), lambda params: time.sleep(1))
model(torch.ones(2, 4)).sum().backward()
"""


def test_a_process_ends_after_its_updates():
    run = subprocess.run([sys.executable, "-c", EXITS_DURING_AN_UPDATE], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


def keep_the_first_layers():
    plan = fsdp_cpp.observe.sharding_plan(sharded())
    layer = 4 * next(group for group in plan.groups if group.module == "layers.0").shard_bytes
    budget = DeviceBudget(2 * layer + 1)  # with gradients and two states
    model = sharded(CPUOffloadPolicy(offloaded().pin_memory, budget))
    assert budget.left() == 1
    on_host = {group.module: group.on_host for group in fsdp_cpp.observe.sharding_plan(model).groups}
    for number in range(4):
        assert on_host[f"layers.{number}"] == (DEVICE != "cpu" and number >= 2)
    train_both(model, sharded(CPUOffloadPolicy(offloaded().pin_memory, DeviceBudget(2 * layer))), OPTIMIZERS["AdamW"])


def test_a_budget_keeps_the_first_layers_on_the_device(ranks):
    ranks(2).run(keep_the_first_layers)
