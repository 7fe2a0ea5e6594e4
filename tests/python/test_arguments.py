"""Tensors are found in every kind of argument and result."""

import collections
import copy
import dataclasses

import pytest
import torch
from parity import ENGINES, batch, compare, mesh_of, needs_torch_2_13, see_grads, whole
from pool import DEVICE
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

import fsdp_cpp

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    value: torch.Tensor
    label: str = "label"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Node:
    def __init__(self, value):
        self.value = value


class Named(collections.OrderedDict):
    pass


_pytree.register_pytree_node(Node, lambda node: ([node.value], None), lambda values, _: Node(values[0]))

WRAPPED = {
    "tuple": (lambda x: (x, 1), lambda t: t[0]),
    "list": (lambda x: [None, [x]], lambda t: t[1][0]),
    "dict": (lambda x: {"a": {"b": x}}, lambda t: t["a"]["b"]),
    "namedtuple": (lambda x: Pair("text", x), lambda t: t.second),
    "dataclass": (lambda x: Record(x), lambda t: t.value),
    "frozen dataclass": (lambda x: Frozen(x), lambda t: t.value),
    "ordered dict": (lambda x: Named(a=x), lambda t: t["a"]),
    "pytree": (lambda x: Node(x), lambda t: t.value),
    "packed sequence": (lambda x: PackedSequence(x, torch.tensor([2, 2])), lambda t: t.data),
}


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.kind = kind

    def forward(self, wrapped, *, also):
        wrap, unwrap = WRAPPED[self.kind]
        assert type(wrapped) is type(also) is type(wrap(torch.zeros(2)))
        return wrap(self.linear(unwrap(wrapped)) + unwrap(also))


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList([Layer(kind), Layer(kind)])
        self.kind = kind

    def forward(self, x):
        wrap, unwrap = WRAPPED[self.kind]
        for layer in self.layers:
            x = unwrap(layer(wrap(x), also=wrap(x)))
        return x


def trees(kind, mixed):
    def make(engine):
        model = Model(kind)
        policy = engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
        for layer in model.layers:
            engine.fully_shard(layer, mesh=mesh_of(), mp_policy=policy)
        return engine.fully_shard(model, mesh=mesh_of(), mp_policy=policy)

    def run(engine, model, seen):
        for step in range(2):
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            see_grads(model, seen, loss)

    compare(make, run)


# torch's engine does not walk these, and then frees parameters that backward needs.
OURS_ALONE = {"pytree", "packed sequence"}
NEW = {"dataclass", "frozen dataclass", "ordered dict"}  # torch 2.11's does not walk these either


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=needs_torch_2_13) if kind in NEW else kind for kind in sorted(WRAPPED.keys() - OURS_ALONE)],
)
def test_trees(ranks, kind, mixed):
    ranks(2).run(trees, kind, mixed)


def trees_of_ours(kind):
    grads = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Model(kind).to(DEVICE)
        if sharded:
            for layer in model.layers:
                fsdp_cpp.fully_shard(layer, mesh=mesh_of())
            fsdp_cpp.fully_shard(model, mesh=mesh_of())
        model(torch.ones(4, 6, device=DEVICE)).square().mean().backward()
        grads.append([p.grad.full_tensor() if sharded else p.grad for p in model.parameters()])
    for expected, value in zip(*grads):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("kind", sorted(OURS_ALONE))
def test_trees_that_torch_does_not_walk(ranks, kind):
    ranks(2).run(trees_of_ours, kind)


class Cache:
    def __init__(self, kept=()):
        self.kept = list(kept)


_pytree.register_pytree_node(Cache, lambda cache: (cache.kept, None), lambda kept, _: Cache(kept))


class Keeping(nn.Linear):
    def forward(self, x, cache):
        y = super().forward(x)
        cache.kept.append(y)
        return y


def caches():
    """What a module writes to a registered node stays there."""

    def make(engine):
        model = nn.ModuleList([Keeping(6, 6), Keeping(6, 6)])
        for layer in model:
            engine.fully_shard(layer, mesh=mesh_of(), mp_policy=engine.MixedPrecisionPolicy(torch.bfloat16))
        return model

    def run(engine, model, seen):
        cache = Cache()
        y = model[1](model[0](batch(0).requires_grad_(), cache), cache)
        assert len(cache.kept) == 2
        loss = sum(each.float().square().mean() for each in cache.kept) + y.float().mean()
        loss.backward()
        see_grads(model, seen, loss)

    compare(make, run)


def test_caches(ranks):
    ranks(2).run(caches)


class Tagged(torch.Tensor):
    """A subclass whose functions are torch's."""


def subclasses():
    """Inputs that need gradients, casts and views keep the class and the attributes of a tensor."""

    class View(nn.Linear):
        def forward(self, x):
            assert type(x) is Tagged and x.dtype == self.weight.dtype
            y = super().forward(x).view(-1)
            y.tag = "kept"
            return y

    for engine in ENGINES.values():
        for dtype in (None, torch.bfloat16):
            policy = engine.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
            model = engine.fully_shard(View(6, 6), mesh=mesh_of(), mp_policy=policy)
            y = model(batch(0).requires_grad_().as_subclass(Tagged))
            assert type(y) is Tagged and y.dtype == torch.float32, engine
            assert dtype is not None or y.tag == "kept"
            y.sum().backward()


def test_subclasses(ranks):
    ranks(2).run(subclasses)


def attention_bias():
    """The class itself casts what it alone knows how to cast."""
    bias = causal_lower_right(4, 4)

    class Attention(nn.Linear):
        def forward(self, x, mask):
            assert type(mask) is type(bias)
            return super().forward(x)

    policy = fsdp_cpp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fsdp_cpp.fully_shard(Attention(6, 6), mesh=mesh_of(), mp_policy=policy)(batch(0), bias)


def test_attention_bias(ranks):
    ranks(2).run(attention_bias)


def tangents():
    """Forward-mode AD goes through blocks whose outputs are views."""

    class Block(nn.Linear):
        def forward(self, x):
            return x + super().forward(x).view(-1).view(x.shape)

    torch.manual_seed(0)
    plain = nn.Sequential(Block(6, 6), Block(6, 6)).to(DEVICE)
    model = copy.deepcopy(plain)
    # Parameters stay whole, because no hook tells of the backward of a tangent alone.
    for layer in model:
        fsdp_cpp.fully_shard(layer, mesh=mesh_of(), reshard_after_forward=False)
    fsdp_cpp.fully_shard(model, mesh=mesh_of())
    for gradients in (True, False):
        outputs = []
        for each in (plain, model):
            with torch.set_grad_enabled(gradients), forward_ad.dual_level():
                output = each(forward_ad.make_dual(batch(0), batch(1)))
                outputs.append(forward_ad.unpack_dual(output).tangent.detach())
        torch.testing.assert_close(*outputs)
    grads = []
    for each in (plain, model):
        with forward_ad.dual_level():
            ones = torch.ones(4, 6, device=DEVICE)  # the same on each rank
            output = each(forward_ad.make_dual(ones, ones))
            forward_ad.unpack_dual(output).tangent.square().sum().backward()
        grads.append([whole(param.grad) for param in each.parameters() if param.grad is not None])
    for expected, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected)


def test_tangents(ranks):
    ranks(2).run(tangents)


def endless_tree():
    class Echo(nn.Linear):
        def forward(self, x, also):
            return super().forward(x)

    model = fsdp_cpp.fully_shard(Echo(6, 6), mesh=mesh_of())
    endless = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        model(batch(0), endless)
    model(batch(0), None).sum().backward()


def test_a_tree_that_contains_itself(ranks):
    ranks(2).run(endless_tree)
