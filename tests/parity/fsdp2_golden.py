"""Trains with Python's FSDP2 and writes down what a rank sees, for C++ to compare.

    fsdp2_golden.py FOLDER

FOLDER/MODEL.pt: initial parameters, and the inputs by step and rank.
FOLDER/MODEL.WORLD.RESHARD.RANK.pt: per step the loss, the local gradients, the
number of collectives and the order of events. Exits with 77 where this torch
has no fully_shard.
"""

import contextlib
import os
import sys
import tempfile
import warnings

import torch
import torch._dynamo  # noqa: F401  once, instead of in every process by FSDP
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

try:
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    print(error)
    sys.exit(77)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

STEPS = 10
WORLDS = (1, 2, 3, 4)
RESHARD = {"true": True, "false": False, "2": 2, "none": None}
MLP_DIM = 5  # divides by none of the worlds; over 4 the last rank gets nothing


# ------------------------------------------------------------ Models (tests/support/models.h)


class MLP(nn.Module):
    def __init__(self, dim, dim_multiplier):
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim)

    def forward(self, x):
        return F.relu(self.out_proj(F.relu(self.in_proj(x))))


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        def heads(t):
            return t.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Without dropout, with tied weights."""

    def __init__(self, n_layers, vocab=8, max_seq_len=16, dim=16, n_heads=4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h))


class TransformerCase:
    seed = 0

    def model():
        return Transformer(n_layers=3)

    def groups(model):
        return [*model.layers, model]

    def input():
        return torch.randint(0, 8, (2, 16))

    def loss(model, tokens):
        logits = model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class MLPsCase:
    """The root owns no parameter."""

    seed = 31  # with which enough of the ReLUs stay alive

    def model():
        return nn.Sequential(*(MLP(MLP_DIM, multiplier) for multiplier in (3, 4, 3)))

    def groups(model):
        return [*model, model]

    def input():
        return torch.randn(4, MLP_DIM)

    def loss(model, x):
        return (model(x) - 1).pow(2).mean()


CASES = {"transformer": TransformerCase, "mlps": MLPsCase}


# ------------------------------------------------------------ What is recorded


@contextlib.contextmanager
def recorded_events(events):
    """Unshard, reshard and post_backward of every group, no-ops left out."""
    names = ("unshard", "reshard", "post_backward")
    originals = {name: getattr(FSDPParamGroup, name) for name in names}

    def record(what, group):
        events.append(f"{what} {group._module_fqn or ''} {group._training_state.name}")

    def unshard(self, *args, **kwargs):
        if self._all_gather_result is None and not self.is_unsharded:
            record("unshard", self)
        return originals["unshard"](self, *args, **kwargs)

    def reshard(self, *args, **kwargs):
        if self._training_state.name != "FORWARD" or self._reshard_after_forward:
            record("reshard", self)
        return originals["reshard"](self, *args, **kwargs)

    def post_backward(self, *args, **kwargs):
        originals["post_backward"](self, *args, **kwargs)
        record("post_backward", self)

    for patched in (unshard, reshard, post_backward):
        setattr(FSDPParamGroup, patched.__name__, patched)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


class CollectiveCounts(TorchDispatchMode):
    """CommDebugMode without all else it does, which takes most of the time."""

    NAMES = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it will call us with its local tensors
        if func.namespace == "c10d":
            name = self.NAMES[func.overloadpacket.__name__]  # one we do not know is an error
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def train(case, start, reshard, rank, mesh):
    model = case.model()
    model.load_state_dict(start["params"], strict=False)  # tied weights come once
    for module in case.groups(model):
        kwargs = {} if reshard is None else {"reshard_after_forward": reshard}
        fully_shard(module, mesh=mesh, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params = dict(model.named_parameters())
    losses, grads = [], {name: [] for name in params}
    events = {"forward": [], "backward": []}
    counts = {"forward": [], "backward": []}

    @contextlib.contextmanager
    def phase(name):
        events[name].append([])
        with recorded_events(events[name][-1]), CollectiveCounts() as collectives:
            yield
        counts[name].append(collectives.counts)

    for step in range(STEPS):
        with phase("forward"):
            loss = case.loss(model, start["inputs"][step][rank])
        with phase("backward"):
            loss.backward()
        losses.append(loss.detach())
        for name, param in params.items():
            grads[name].append(param.grad.to_local().clone())
            # Else there would be nothing to compare.
            assert dist.get_world_size() > 1 or grads[name][-1].any(), f"no gradient in {name}"
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return {
        "losses": torch.stack(losses),
        "grads": {name: torch.stack(list_of) for name, list_of in grads.items()},
        "params": {name: param.detach().to_local().clone() for name, param in params.items()},
        "events": events,
        "counts": counts,
    }


# ------------------------------------------------------------ Running it


def run_rank(rank, world, starts, folder, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for name, case in CASES.items():
        for label, reshard in RESHARD.items():
            if label != "2" or (world >= 2 and world % 2 == 0):
                result = train(case, starts[name], reshard, rank, mesh)
                torch.save(result, f"{folder}/{name}.{world}.{label}.{rank}.pt")
    dist.destroy_process_group()


def main(folder):
    torch.set_num_threads(1)
    os.makedirs(folder, exist_ok=True)
    starts = {}
    for name, case in CASES.items():
        torch.manual_seed(case.seed)
        params = {key: param.detach() for key, param in case.model().named_parameters()}
        inputs = [[case.input() for _ in range(max(WORLDS))] for _ in range(STEPS)]
        starts[name] = {"params": params, "inputs": inputs}
        torch.save(starts[name], f"{folder}/{name}.pt")
    with tempfile.TemporaryDirectory() as stores:
        for world in WORLDS:
            # Forked: importing torch takes longer than the training.
            arguments = (world, starts, folder, f"{stores}/{world}")
            mp.start_processes(run_rank, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
