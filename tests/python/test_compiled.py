"""torch.compile of sharded modules, with both engines: the same results, from as many graphs."""

import torch
from parity import Mlp, compare, mesh_of, sharded_mlps, train
from torch import nn
from torch._dynamo.utils import counters

BACKEND = "aot_eager"  # compiles nothing to machine code, which takes long


def layers(engine, compiled):
    """Layers that are compiled, each as one graph, and then sharded."""
    model = nn.Sequential(*[compiled(Mlp()) for _ in range(3)])
    for layer in model:
        engine.fully_shard(layer, mesh=mesh_of())
    return engine.fully_shard(model, mesh=mesh_of())


def wrapped_layers(engine):
    return layers(engine, lambda layer: torch.compile(layer, backend=BACKEND, fullgraph=True))


def layers_in_place(engine):
    def compiled(layer):
        layer.compile(backend=BACKEND, fullgraph=True)
        return layer

    return layers(engine, compiled)


def whole_model(engine):
    """A sharded model. The compiler breaks its graph at the hooks."""
    return torch.compile(sharded_mlps(engine), backend=BACKEND)


def compiled(make):
    def run(engine, model, seen):
        torch._dynamo.reset()
        counters.clear()
        train(engine, model, seen)
        seen.append(("graphs", counters["stats"]["unique_graphs"]))
        assert counters["stats"]["unique_graphs"] > 0

    compare(make, run, collectives=False)  # the compiler would compile what records them


def test_layers(ranks):
    ranks(2).run(compiled, wrapped_layers)


def test_layers_in_place(ranks):
    ranks(2).run(compiled, layers_in_place)


def test_model(ranks):
    ranks(2).run(compiled, whole_model)


def layers_in_place_afterwards(engine):
    model = sharded_mlps(engine)
    for layer in model:
        layer.compile(backend=BACKEND, fullgraph=True)
    return model


def test_layers_in_place_after_sharding(ranks):
    ranks(2).run(compiled, layers_in_place_afterwards)


def whole_model_in_place(engine):
    model = sharded_mlps(engine)
    model.compile(backend=BACKEND, fullgraph=True)
    return model


def test_model_in_place_after_sharding(ranks):
    ranks(2).run(compiled, whole_model_in_place)
