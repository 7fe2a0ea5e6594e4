"""What users and libraries see of a sharded module."""

import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
import sys
import time
import types
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from parity import ENGINES, Mlp, batch, compare, mesh_of, needs_torch_2_13, sharded_mlps, train, whole
from pool import DEVICE
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import ReplicateModule as TorchReplicateModule
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_cpp
import fsdp_cpp.observe
import fsdp_cpp.optim


def faces():
    model = sharded_mlps(fsdp_cpp)
    layer = model[0]
    assert isinstance(layer, fsdp_cpp.FSDPModule) and isinstance(layer, torch_fsdp.FSDPModule)
    assert isinstance(layer, Mlp) and type(layer).__name__ == "FSDPMlp"
    weight = layer.up.weight
    assert isinstance(weight, DTensor) and isinstance(weight, nn.Parameter)
    assert weight.placements == (Shard(0),) and weight.shape == (10, 6)
    seen = []
    layer.up.register_forward_pre_hook(lambda module, _: seen.append((type(module.weight), module.weight.shape)))
    model(batch(0)).sum().backward()
    assert seen == [(nn.Parameter, (10, 6))]
    assert layer.up.weight is weight and isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    layer.unshard()
    assert type(layer.up.weight) is nn.Parameter
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert layer.up.weight is weight  # a state dict has shards
    assert type(model[:2]) is nn.Sequential
    replica = fsdp_cpp.replicate(nn.Sequential(Mlp(), Mlp()), mesh=mesh_of())
    assert type(replica).__name__ == "ReplicateSequential" and type(replica[:1]) is nn.Sequential
    assert isinstance(replica, fsdp_cpp.ReplicateModule) and isinstance(replica, TorchReplicateModule)
    for each in (model, replica):
        with pytest.raises(AssertionError, match="does not support deepcopy"):
            copy.deepcopy(each)
    for each in (*model, model, model[0].up):  # for Dynamo
        assert each._is_fsdp_managed_module and each._fsdp_use_orig_params
    assert not hasattr(replica, "_is_fsdp_managed_module")
    replicas = sharded_mlps(fsdp_cpp, mesh=mesh_of(1, dist.get_world_size()))
    assert replicas[0].up.weight.placements == (Replicate(), Shard(0))


def test_faces(ranks):
    ranks(2).run(faces)


def signature(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@needs_torch_2_13
def test_signatures():
    for name in ("fully_shard", "replicate", "register_fsdp_forward_method", "share_comm_ctx"):
        assert signature(getattr(fsdp_cpp, name)) == signature(getattr(ENGINES["torch"], name)), name
    for name, method in inspect.getmembers(torch_fsdp.FSDPModule, inspect.isfunction):
        if not name.startswith("_"):
            own = getattr(fsdp_cpp.FSDPModule, name)
            assert own is not method and signature(own) == signature(method), name


def without_docstring(owner):
    """The public functions and classes of a class or module that help() has nothing to say about."""
    home = owner.__name__ if inspect.ismodule(owner) else owner.__module__
    own = [name for name, value in vars(owner).items() if getattr(value, "__module__", None) == home]
    return [
        f"{owner.__name__}.{name}"
        for name in getattr(owner, "__all__", own)
        if not name.startswith("_") and callable(getattr(owner, name)) and not inspect.getdoc(getattr(owner, name))
    ]


def test_docstrings():
    owners = [fsdp_cpp, fsdp_cpp.optim, fsdp_cpp.observe, fsdp_cpp.FSDPModule, fsdp_cpp.UnshardHandle]
    owners += [getattr(fsdp_cpp.optim, name) for name in ("AdamW", "LowPrecisionAdamW", "Muon")]
    owners += [fsdp_cpp.observe.Trace, fsdp_cpp.observe.Run]
    assert [name for owner in owners for name in without_docstring(owner)] == []
    arguments = list(inspect.signature(fsdp_cpp.fully_shard).parameters)
    assert [name for name in arguments if f"        {name}: " not in fsdp_cpp.fully_shard.__doc__] == []


def errors(engine_name):
    """The same misuse gets the same error from both engines."""
    engine = ENGINES[engine_name]
    mesh = mesh_of()

    @contextlib.contextmanager
    def refused(kind, text):
        with pytest.raises(kind, match=text):
            yield

    with refused(ValueError, "does not support containers that do not implement forward"):
        engine.fully_shard(nn.ModuleList([Mlp()]), mesh=mesh)
    with refused(ValueError, "expects a 1D or 2D DeviceMesh but got"):
        engine.fully_shard(Mlp(), mesh=dist.init_device_mesh(DEVICE, (1, 1, 2), mesh_dim_names=("a", "b", "c")))
    with refused(AssertionError, "Please init the 2D mesh for HSDP with mesh_dim_names specified"):
        engine.fully_shard(Mlp(), mesh=dist.init_device_mesh(DEVICE, (1, 2)))
    with refused(ValueError, "it should be a factor of 2, not 3"):
        engine.fully_shard(Mlp(), mesh=mesh, reshard_after_forward=3)
    with refused(ValueError, "should be a bool or an int"):
        engine.fully_shard(Mlp(), mesh=mesh, reshard_after_forward="yes")
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with refused(ValueError, "Change scale to a 1D tensor with numel equal to 1"):
        engine.fully_shard(scalar, mesh=mesh)
    module = engine.fully_shard(Mlp(), mesh=mesh)
    with refused(AssertionError, "can only be applied to a module once"):
        engine.fully_shard(module, mesh=mesh)
    with refused(ValueError, "Expects FSDPModule but got"):
        module.set_modules_to_forward_prefetch([Mlp()])
    with refused(ValueError, "reshard_after_forward should be a bool"):
        module.set_reshard_after_forward(2)
    with refused(TypeError, "max_input_buffers must be an int"):
        module.set_reduce_scatter_max_input_buffers(True)
    with refused(ValueError, "max_input_buffers must be a positive int"):
        module.set_reduce_scatter_max_input_buffers(0)
    with refused(ValueError, "Invalid shard_placement_fn result"):
        engine.fully_shard(Mlp(), mesh=mesh, shard_placement_fn=lambda param: Replicate())
    with refused(ValueError, "Expects list of FSDPModules"):
        engine.share_comm_ctx([Mlp()])
    with torch.device("meta"):
        unfilled = Mlp()
    engine.fully_shard(unfilled, mesh=mesh)
    with refused(RuntimeError, "should be materialized from meta device before training"):
        unfilled(batch(0))
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    engine.fully_shard(tied[0], mesh=mesh)
    engine.fully_shard(tied[1], mesh=mesh)
    engine.fully_shard(tied, mesh=mesh)
    with refused(ValueError, "already managed by another FSDP group"):
        tied(batch(0))
    with refused(RuntimeError, "must be called on the root"):
        outer = sharded_mlps(engine)
        outer(batch(0))
        outer[0].reset_iter_state()


@pytest.mark.parametrize("engine", [pytest.param("torch", marks=needs_torch_2_13), "fsdp_cpp"])
def test_errors(ranks, engine):
    ranks(2).run(errors, engine)


def own_errors():
    mesh = mesh_of()
    outer = nn.Sequential(nn.Linear(4, 4))
    fsdp_cpp.fully_shard(outer, mesh=mesh)
    with pytest.raises(ValueError, match="'weight' of Linear is sharded already: .* inner modules before"):
        fsdp_cpp.fully_shard(outer[0], mesh=mesh)
    assert type(outer[0]) is nn.Linear
    model = sharded_mlps(fsdp_cpp)
    whole_weight = []
    handle = model[0].up.register_forward_pre_hook(lambda module, _: whole_weight.append(module.weight))
    model(batch(0)).sum().backward()
    handle.remove()
    with pytest.raises(RuntimeError, match="0.up.weight.* while it is sharded"):
        torch.nn.functional.linear(batch(0), whole_weight[0])
    model[0].up.weight = nn.Parameter(torch.zeros(10, 6))
    with pytest.raises(ValueError, match="was replaced by a Parameter, but is a DTensor outside of forward"):
        model(batch(0))


def functions_of_a_model():
    """What torch.func would compute wrongly is refused."""
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()
    params = dict(model.named_parameters())
    computed = {name: 2 * param for name, param in params.items()}
    with pytest.raises(ValueError, match="parameter '.*' was replaced by the result of a computation.*functional_call"):
        torch.func.functional_call(model, computed, batch(0))
    with torch.no_grad():  # without gradients nothing is lost
        expected = torch.func.functional_call(model, {name: 2 * param for name, param in params.items()}, batch(0))
        for param in params.values():
            param.mul_(2)
        assert torch.equal(model(batch(0)), expected)

    def loss(x):
        return model(x).sum()

    transforms = {
        "grad": lambda: torch.func.grad(loss)(batch(0)),
        "jvp": lambda: torch.func.jvp(loss, (batch(0),), (batch(1),)),
        "vmap": lambda: torch.func.vmap(loss)(batch(0)),
    }
    for name, transform in transforms.items():
        with pytest.raises(NotImplementedError, match=f"torch.func .*{name}.* cannot go through the root module; use"):
            transform()
    model(batch(0)).sum().backward()  # goes on


def test_functions_of_a_model(ranks):
    ranks(2).run(functions_of_a_model)


def pickled(engine_name):
    engine = ENGINES[engine_name]
    model = sharded_mlps(engine)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(model)
    param = pickle.loads(pickle.dumps(model[0].up.weight))
    assert isinstance(param, DTensor) and param.placements == model[0].up.weight.placements
    assert torch.equal(param.to_local(), model[0].up.weight.to_local())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for name, value in model.state_dict().items():
        assert torch.equal(whole(loaded[name]), whole(value)), name
    # A parameter's file has its own shard, not that of the whole group.
    file = io.BytesIO()
    torch.save(model[0].down.bias, file)
    assert len(file.getvalue()) < 10_000


@pytest.mark.parametrize("engine", ENGINES)
def test_pickling(ranks, engine):
    ranks(2).run(pickled, engine)


def swapped():
    """load_state_dict that swaps tensors instead of copying into them."""

    def run(engine, model, seen):
        train(engine, model, seen)
        state = {name: (2 * value).detach() for name, value in model.state_dict().items()}
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.load_state_dict(state)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), whole(state[name])), name
        train(engine, model, seen)

    compare(sharded_mlps, run, collectives=False)  # the test itself gathers


def test_load_that_swaps_tensors(ranks):
    ranks(2).run(swapped)


def damaged_tensors():
    model = sharded_mlps(fsdp_cpp)
    hook = next(iter(model._forward_pre_hooks.values()))
    with pytest.raises(TypeError, match="takes 3 arguments"):
        hook()
    model(batch(0)).sum().backward()
    weight = model[0].up.weight
    local = weight.grad._local_tensor
    weight.grad._local_tensor = 5
    with pytest.raises(TypeError, match="is a int, not a tensor"):
        model(batch(0)).sum().backward()
    weight.grad._local_tensor = local
    weight._local_tensor = None
    with pytest.raises(TypeError, match="is a NoneType, not a tensor"):
        model(batch(0))


def grad_of_other_sizes():
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()
    grad = model[0].up.weight.grad
    grad._local_tensor = grad._local_tensor[:, :3].clone()
    with pytest.raises(ValueError, match="the .grad of parameter '0.up.weight' has a local tensor .*set it to None"):
        model(batch(0)).sum().backward()


def test_grad_of_other_sizes(ranks):
    ranks(2).run(grad_of_other_sizes)


def test_damaged_tensors(ranks):
    ranks(2).run(damaged_tensors)


def norms():
    model = sharded_mlps(fsdp_cpp)
    for norm_type in (1, 2, 3.5, 0, float("inf"), float("-inf")):
        results = []
        for clip in (torch.nn.utils.clip_grad_norm_, fsdp_cpp.optim.clip_grad_norm_):
            model.zero_grad()
            model(batch(0)).square().mean().backward()
            norm = clip(model.parameters(), 0.01, norm_type)
            results.append([whole(norm), *[whole(param.grad) for param in model.parameters()]])
        torch.testing.assert_close(results[1], results[0])


def test_clip_grad_norm_of_every_type(ranks):
    ranks(2).run(norms)


def norms_of_few_elements():
    """Not every rank has elements of the only parameters."""
    for norm_type in (1, 2, float("inf")):
        model = fsdp_cpp.fully_shard(nn.Linear(6, 5, device=DEVICE), mesh=mesh_of())
        model(batch(0)).square().mean().backward()
        expected = [whole(param.grad) for param in model.parameters()]
        norm = torch.nn.utils.get_total_norm(expected, norm_type)
        torch.testing.assert_close(fsdp_cpp.optim.clip_grad_norm_(model.parameters(), 0.01, norm_type), norm)
        for param, grad in zip(model.parameters(), expected):
            torch.testing.assert_close(whole(param.grad), grad * torch.clamp(0.01 / (norm + 1e-6), max=1.0))


def test_clip_grad_norm_where_ranks_have_no_elements(ranks):
    ranks(4).run(norms_of_few_elements)


def test_own_errors(ranks):
    ranks(2).run(own_errors)


def hooks_from_before():
    """Gets the whole gradient here. torch's engine drops the hook."""
    shapes = {}
    for which, engine in ENGINES.items():
        model, seen = Mlp().to(DEVICE), []
        model.up.weight.register_hook(lambda grad, seen=seen: seen.append(tuple(grad.shape)))
        engine.fully_shard(model, mesh=mesh_of())(batch(0)).sum().backward()
        shapes[which] = seen
    assert shapes == {"torch": [], "fsdp_cpp": [(10, 6)]}


def test_hooks_from_before_fully_shard(ranks):
    ranks(2).run(hooks_from_before)


def counts_and_names():
    counts, names, collectives = [], [], []
    for engine in ENGINES.values():
        model = sharded_mlps(engine)
        with CommDebugMode() as counter:
            model(batch(0)).sum().backward()
        counts.append({str(kind): number for kind, number in counter.get_comm_counts().items()})
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(batch(0)).sum().backward()
        events = {event.key: event.count for event in profile.key_averages()}
        names.append({name for name in events if name.startswith("FSDP::")})
        collectives.append({name: count for name, count in events.items() if name.startswith("gloo:")})
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0
    missing = names[0] - names[1]
    assert not missing, missing
    # A profile must not hold the comparison of the ranks' calls, which ends after it: torch would crash.
    assert collectives[0] == collectives[1]
    assert collectives[0] or DEVICE != "cpu"


def test_counts_and_profiler_names(ranks):
    ranks(2).run(counts_and_names)


def lifetime():
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()
    watched = [weakref.ref(model), weakref.ref(model[0].up.weight), weakref.ref(model[0]._get_fsdp_state())]
    del model
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    model = sharded_mlps(fsdp_cpp)
    loss = model(batch(0)).sum()
    del model
    gc.collect()
    with pytest.raises(RuntimeError, match="after the module was gone"):
        loss.backward()


def test_a_model_goes_with_its_last_reference(ranks):
    ranks(2).run(lifetime)


def patched():
    user = types.ModuleType("a_user_of_torch")
    user.fully_shard, user.shard_it = torch.distributed.fsdp.fully_shard, torch.distributed.fsdp.fully_shard
    theirs = user.fully_shard
    sys.modules[user.__name__] = user
    try:
        first, second = fsdp_cpp.patch_torch(), fsdp_cpp.patch_torch()
        assert user.fully_shard is user.shard_it is torch.distributed.fsdp.fully_shard is fsdp_cpp.fully_shard
        assert isinstance(user.fully_shard(Mlp(), mesh=mesh_of()), fsdp_cpp.FSDPModule)
        first()
        second()
        assert user.fully_shard is user.shard_it is torch.distributed.fsdp.fully_shard is theirs
        assert fsdp_cpp.fully_shard is not theirs
    finally:
        del sys.modules[user.__name__]


def test_patch_torch(ranks):
    ranks(2).run(patched)


def taken_before():
    """A function that was taken from torch before the patch says so."""
    early = functools.partial(torch_fsdp.fully_shard, mesh=mesh_of())
    undo = fsdp_cpp.patch_torch()
    try:
        with pytest.raises(RuntimeError, match="taken from torch before fsdp_cpp.patch_torch"):
            early(Mlp())
    finally:
        undo()
    early(Mlp())
    layer = fsdp_cpp.fully_shard(Mlp(), mesh=mesh_of())
    with pytest.raises(AttributeError, match="use that of fsdp_cpp"):
        torch_fsdp.share_comm_ctx([layer])


def test_torch_functions_from_before(ranks):
    ranks(2).run(taken_before)


def two_engines():
    """One engine above or below the other is an error."""
    layer = torch_fsdp.fully_shard(Mlp(), mesh=mesh_of())
    with pytest.raises(ValueError, match="belongs to torch's own fully_shard or replicate"):
        fsdp_cpp.fully_shard(nn.Sequential(layer), mesh=mesh_of())
    mesh = dist.init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("shard", "other"))
    layer = fsdp_cpp.fully_shard(Mlp(), mesh=mesh["shard"])
    model = torch_fsdp.fully_shard(nn.Sequential(layer), mesh=mesh["other"])
    with pytest.raises(ValueError, match="torch's own fully_shard took parameter '.*' of a Linear"):
        model(batch(0))


def test_two_engines(ranks):
    ranks(2).run(two_engines)


class Twice(nn.Module):
    """Has one module under two names."""

    def __init__(self, inner):
        super().__init__()
        self.a = self.b = inner

    def forward(self, x):
        return self.a(x)


def trees_of_modules():
    """A module with 2 ** 20 names, which knows its parent."""
    torch.manual_seed(0)
    plain = Mlp().to(DEVICE)
    inner = copy.deepcopy(plain)
    model = fsdp_cpp.fully_shard(inner, mesh=mesh_of())
    for _ in range(20):
        model = Twice(model)
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    inner.parent = model
    for each in (plain, model):
        each(torch.ones(4, 6, device=DEVICE)).sum().backward()
    model.set_requires_gradient_sync(True)
    for expected, param in zip(plain.parameters(), inner.parameters()):
        torch.testing.assert_close(whole(param.grad), expected.grad)


def test_trees_of_modules(ranks):
    ranks(2).run(trees_of_modules)
