"""Tensors are found in every kind of argument and result."""

import collections
import dataclasses

import pytest
import torch
from parity import batch, compare, mesh_of, needs_torch_2_13, see_grads
from pool import DEVICE
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

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
    import fsdp_cpp

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


def endless_tree():
    import fsdp_cpp

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
