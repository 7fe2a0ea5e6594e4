"""Parameters that are tensor subclasses with all-gather extensions, with both engines."""

import functools
import gc

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from parity import ENGINES, Mlp, batch, mesh_of, see_grads
from pool import DEVICE
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_cpp


class SentAsBf16(torch.Tensor):
    """Ranks send it as bf16. The whole is a plain tensor."""

    log: list = []  # the arguments of fsdp_pre_all_gather

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_inside = data

    def __repr__(self):
        return f"{type(self).__name__}({self.data_inside})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        inside = functools.partial(pytree.tree_map_only, cls, lambda each: each.data_inside)
        out = func(*inside(args), **inside(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def __tensor_flatten__(self):
        return ["data_inside"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, meta, outer_size, outer_stride):
        return cls(inner["data_inside"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        SentAsBf16.log.append((mesh.ndim, mesh.size(), outer_size, outer_stride, type(module), mp_policy))
        rows = -(-outer_size[0] // mesh.size())
        padded = self.data_inside.new_zeros((rows, *outer_size[1:]), dtype=torch.bfloat16)
        padded[: self.size(0)].copy_(self.data_inside)
        return (padded,), outer_size

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (sent,) = outputs
        assert sent.dtype == torch.bfloat16 and sent.size(0) >= metadata[0]
        values = sent[: metadata[0]]
        if out is not None:
            target = out._local_tensor if isinstance(out, DTensor) else out
            with torch.autograd._unsafe_preserve_version_counter(target):
                target.copy_(values)
            return None
        whole = values.to(param_dtype, copy=True)
        return whole, (whole,)


class Pair(SentAsBf16):
    """Ranks send it as two tensors: bf16, and the rest."""

    def fsdp_pre_all_gather(self, mesh):
        high = self.data_inside.to(torch.bfloat16)
        return (high, self.data_inside - high.float()), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        high, low = outputs
        values = (high.float() + low).to(param_dtype)
        if out is not None:
            with torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values)
            return None
        return values, (values,)


def with_subclass(model, kind=SentAsBf16):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if isinstance(weight, DTensor):
                inside = DTensor(kind(weight._local_tensor.detach()), weight._spec, requires_grad=False)
            else:
                inside = kind(weight.detach())
            module.weight = nn.Parameter(inside)
    return model


def make(engine, kind=SentAsBf16, mesh=(), **options):
    options["mesh"] = mesh_of(*mesh)
    model = with_subclass(nn.Sequential(*[Mlp() for _ in range(3)]), kind)
    for layer in model:
        engine.fully_shard(layer, **options)
    return engine.fully_shard(model, **options)


def plain_values(model):
    """The shards as plain tensors: full_tensor() of a subclass needs more operators than these have."""
    result = {}
    for name, param in model.named_parameters():
        local = param._local_tensor
        result[name] = (local.data_inside if isinstance(local, SentAsBf16) else local).detach().clone()
    return result


def steps(engine, model, seen, count=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for step in range(count):
        loss = model(batch(step)).square().mean()
        loss.backward()
        see_grads(model, seen, loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += plain_values(model).items()


def same(make_model, run=steps, calls=True):
    """As parity.compare, without a state dict of whole tensors. Compares the calls of the extensions, too."""
    results = []
    for engine in ENGINES.values():
        torch.manual_seed(0)
        SentAsBf16.log.clear()
        seen: list = []
        run(engine, make_model(engine), seen)
        results.append((seen, list(SentAsBf16.log)))
        gc.collect()
    (theirs, their_log), (ours, our_log) = results
    assert [name for name, _ in theirs] == [name for name, _ in ours]
    for (name, expected), (_, value) in zip(theirs, ours, strict=True):
        assert expected is value is None or torch.equal(expected, value), (name, expected, value)
    assert not calls or their_log == our_log


OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "resharded": {"reshard_after_forward": True},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def trains(kind, options, mesh=()):
    same(functools.partial(make, kind=kind, mesh=mesh, **OPTIONS[options]))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [SentAsBf16, Pair])
def test_trains(ranks, kind, options):
    if kind is Pair and options == "bf16":
        pytest.skip("Pair has fp32 values")
    ranks(2).run(trains, kind, options)


@pytest.mark.parametrize("options", ["plain", "kept", "bf16"])
def test_uneven(ranks, options):
    """10 rows over 4 ranks, and 6 over 4: the last rank has none."""
    ranks(4).run(trains, SentAsBf16, options)


def test_replicas(ranks):
    ranks(4).run(trains, SentAsBf16, "plain", (2, 2))


def on_one_rank():
    trains(SentAsBf16, "plain")


def test_one_rank(ranks):
    ranks(1).run(on_one_rank)


def tensor_parallel():
    """The shard inside of the DTensor of tensor parallelism is a subclass."""
    mesh = dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))

    def make_model(engine):
        model = nn.Sequential(Mlp(), Mlp()).to(DEVICE)
        for layer in model:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            with_subclass(layer)
            engine.fully_shard(layer, mesh=mesh["dp"])
        return engine.fully_shard(model, mesh=mesh["dp"])

    def run(engine, model, seen):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank() // 2)
            loss = model(torch.randn(4, 6, generator=generator).to(DEVICE)).square().mean()
            loss.backward()
            seen.append(("loss", loss.detach().clone()))
            seen += [(name, param.grad._local_tensor.clone()) for name, param in model.named_parameters()]
            optimizer.step()
            optimizer.zero_grad()
            seen += plain_values(model).items()

    same(make_model, run)


def test_tensor_parallel(ranks):
    ranks(4).run(tensor_parallel)


def accumulates():
    def run(engine, model, seen):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        for step in range(6):
            model.set_requires_gradient_sync(step % 2 == 1)
            loss = model(batch(step)).square().mean()
            loss.backward()
            seen.append(("loss", loss.detach().clone()))
            if step % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
                seen += plain_values(model).items()

    same(make, run)


def test_gradient_accumulation(ranks):
    ranks(2).run(accumulates)


def evaluates_between_steps():
    def run(engine, model, seen):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        with torch.inference_mode():
            seen.append(("before", model(x).clone()))
        steps(engine, model, seen, 2)
        with torch.no_grad():
            seen.append(("between", model(x).clone()))
        steps(engine, model, seen, 2)
        model.unshard()
        seen.append(("whole", model[0].up.bias.detach().clone()))
        model.reshard()

    model = make(fsdp_cpp)
    ours: list = []
    run(fsdp_cpp, model, ours)  # torch's engine cannot train after a first forward under inference_mode
    assert len(ours) > 4

    def without_inference(engine, model, seen):
        steps(engine, model, seen, 2)
        with torch.no_grad():
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
            seen.append(("between", model(x).clone()))
        steps(engine, model, seen, 2)

    # After a forward without a backward, torch's engine gathers the root once more than it needs to.
    same(make, without_inference, calls=False)


def test_evaluates_between_steps(ranks):
    ranks(2).run(evaluates_between_steps)


def memory_of_whole():
    """Between forward and backward neither what was received nor what was made of it has memory."""
    seen: list = []
    model = make(fsdp_cpp, reshard_after_forward=True)
    steps(fsdp_cpp, model, seen, 1)
    leaves: list = []
    model[0].up.register_forward_hook(lambda module, args, output: leaves.append(module.weight))
    loss = model(torch.ones(4, 6, device=DEVICE)).sum()
    assert type(leaves[0]) is nn.Parameter and leaves[0].shape == (10, 6)
    assert leaves[0].untyped_storage().size() == 0
    loss.backward()
    assert leaves[0].untyped_storage().size() == 0


def test_frees_the_whole(ranks):
    ranks(2).run(memory_of_whole)


def written_between_forwards():
    """Whoever writes to a shard, by the DTensor or by what is inside, the next forward sees it."""
    model = make(fsdp_cpp, reshard_after_forward=False)
    x = torch.ones(4, 6, device=DEVICE)
    with torch.no_grad():
        first = model(x)
        for param in model.parameters():
            param.zero_()
        assert torch.equal(model(x), x) and not torch.equal(first, x)
        model.reshard()
        for param in model.parameters():
            param.to_local().fill_(1)
        assert not torch.equal(model(x), x)


def test_written_between_forwards(ranks):
    ranks(2).run(written_between_forwards)


def from_meta():
    with torch.device("meta"):
        model = with_subclass(nn.Sequential(Mlp(), Mlp()))
    for layer in model:
        fsdp_cpp.fully_shard(layer, mesh=mesh_of())
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    with pytest.raises(RuntimeError, match="meta device"):
        model(torch.ones(4, 6, device=DEVICE))
    model.to_empty(device=DEVICE)
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    assert torch.equal(model(torch.ones(4, 6, device=DEVICE)), torch.ones(4, 6, device=DEVICE))
    steps(fsdp_cpp, model, [], 2)


def test_from_meta(ranks):
    ranks(2).run(from_meta)


class NoExtension(SentAsBf16):
    fsdp_pre_all_gather = property()
    fsdp_post_all_gather = property()


def refusals():
    x = torch.ones(4, 6, device=DEVICE)
    model = make(fsdp_cpp, NoExtension)
    with pytest.raises(TypeError, match="Linear.weight is a NoExtension, which has no fsdp_pre_all_gather"):
        model(x)
    if dist.get_world_size() == 4:
        with pytest.raises(NotImplementedError, match="cannot be divided over 2 ranks after forward"):
            make(fsdp_cpp, reshard_after_forward=2)
    plain = nn.Sequential(Mlp())
    fsdp_cpp.fully_shard(plain, mesh=mesh_of())
    plain[0].up.weight._local_tensor.fsdp_pre_all_gather = lambda *_: None
    with pytest.raises(NotImplementedError, match="but is a plain tensor"):
        plain(x)
    for wrong in (lambda mesh: ((), None), lambda mesh: 1):
        kind = type("Wrong", (SentAsBf16,), {"fsdp_pre_all_gather": lambda self, mesh, wrong=wrong: wrong(mesh)})
        with pytest.raises((TypeError, ValueError)):
            make(fsdp_cpp, kind)(x)


class Columns(SentAsBf16):
    """Sends what it has; the whole is what was received."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.data_inside.contiguous(),), None

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (whole,) = outputs
        return None if out is not None else (whole, (whole,))


class Wrapped(Columns):
    """The whole is a subclass, too, so that all gradients are."""

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        (whole,) = outputs
        return None if out is not None else (Columns(whole), (whole,))


def columns():
    def make_model(engine):
        model = with_subclass(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), Columns)
        return engine.fully_shard(model, mesh=mesh_of(), shard_placement_fn=lambda param: Shard(param.dim() - 1))

    same(make_model)


def test_sharded_along_another_dim(ranks):
    ranks(2).run(columns)


def wrapped():
    same(functools.partial(make, kind=Wrapped))


def test_wholes_and_gradients_that_are_subclasses(ranks):
    ranks(2).run(wrapped)


def forms_change():
    """What is sent must not change, and a plain shard must stay one."""
    x = torch.ones(4, 6, device=DEVICE)
    changing = type("Changing", (Columns,), {})
    model = make(fsdp_cpp, changing)
    with torch.no_grad():
        model(x)
        changing.fsdp_pre_all_gather = lambda self, mesh: ((self.data_inside.to(torch.bfloat16),), None)
        with pytest.raises(ValueError, match="has returned other tensors for parameter Linear.weight than before"):
            model(x)
        with pytest.raises(ValueError, match="was given a shard of size"):
            weight = model[0].up.weight
            weight._local_tensor = changing(torch.zeros(10, 6, device=DEVICE))
            model(x)
    plain = nn.Sequential(Mlp())
    fsdp_cpp.fully_shard(plain, mesh=mesh_of())
    weight = plain[0].up.weight
    inside = DTensor(SentAsBf16(weight._local_tensor.clone()), weight._spec, requires_grad=False)
    plain[0].up.weight = nn.Parameter(inside)
    with pytest.raises(NotImplementedError, match="was replaced by a tensor subclass"):
        plain(x)


def test_forms_change(ranks):
    ranks(2).run(forms_change)


def test_refusals(ranks):
    ranks(2).run(refusals)
    ranks(4).run(refusals)


def float8():
    """torchao's float8 training. Torch's own engine cannot gather float8 over gloo, so one model is not sharded."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def model_of(sharded):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)]).to(DEVICE)
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=sharded, emulate=True)
        return convert_to_float8_training(model, config=config)

    reference, model = model_of(False), model_of(True)
    for layer in model:
        fsdp_cpp.fully_shard(layer, mesh=mesh_of())
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    assert type(model[0].weight._local_tensor).__name__ == "WeightWithDynamicFloat8CastTensor"
    leaves: list = []
    model[0].register_forward_pre_hook(lambda module, args: leaves.append(module.weight))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 32, generator=generator).to(DEVICE)
        losses = []
        for each, optimizer in zip((reference, model), optimizers):
            loss = each(x).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if each is reference:
                for param in each.parameters():
                    dist.all_reduce(param.grad)
                    param.grad /= dist.get_world_size()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)
    assert all(leaf is leaves[0] for leaf in leaves) and type(leaves[0]).__name__ == "Float8TrainingTensor"


def test_torchao_float8(ranks):
    pytest.importorskip("torchao")
    ranks(2).run(float8)
