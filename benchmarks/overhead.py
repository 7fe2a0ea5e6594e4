"""The Python side of `./fsdp bench overhead`, started by it: reads a command a line, answers a line.

  check      one step of both models: what they are, what they computed and communicated, as JSON
  plain N    N steps of the plain model: median seconds of the step, of forward and backward, of the rest
  fsdp N     the same with fully_shard
  fake M N   torch's fake group alone: median seconds of the collectives of a group and step, shards of M, N times
"""

import argparse
import json
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    NO_FSDP = None
except ImportError as error:
    NO_FSDP = str(error)


# The model of transformer.h: change both.


class RmsNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.sizes = (dim,)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.sizes, self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = RmsNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.norm2 = RmsNorm(dim)
        self.gate = nn.Linear(dim, 4 * dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)

    def split(self, t):
        return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

    def attention(self, x):
        mixed = F.scaled_dot_product_attention(
            self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x)), is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self, dim, layers, heads, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = []
        for i in range(layers):
            self.blocks.append(Block(dim, heads))
            self.add_module(f"block{i}", self.blocks[-1])
        self.norm = RmsNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill_parameters(model):
    for parameter in model.parameters():
        parameter.copy_(torch.arange(parameter.numel(), dtype=torch.float).cos().mul(0.1).view_as(parameter))


def clock(options):
    return time.process_time if options.clock == "cpu" else time.perf_counter


class Side:
    """One model and its step."""

    def __init__(self, options, sharded):
        self.now = clock(options)
        self.model = Transformer(options.dim, options.layers, options.heads, options.vocabulary)
        fill_parameters(self.model)
        self.shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        if sharded:
            mesh = dist.init_device_mesh("cpu", (options.world_size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = None
        if options.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        else:
            self.parameters = list(self.model.parameters())
        self.tokens = (torch.arange(options.sequence) * 7 % options.vocabulary).view(1, -1)
        self.targets = torch.arange(options.sequence) * 11 % options.vocabulary

    def forward_backward(self):
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), self.targets)
        loss.backward()
        return loss

    def finish(self):
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            for parameter in self.parameters:
                parameter.grad = None

    def time(self, steps):
        now = self.now
        times = []
        for _ in range(steps + 1):
            start = now()
            self.forward_backward()
            middle = now()
            self.finish()
            end = now()
            times.append((end - start, middle - start, end - middle))
        return [statistics.median(column) for column in zip(*times[1:])]  # the first one warms up

    def check(self):
        """Loss and gradients of one step, and its collectives."""
        from torch.distributed.tensor.debug import CommDebugMode

        comm = CommDebugMode()
        with comm:
            loss = self.forward_backward().item()
        square = 0.0
        for parameter in self.model.parameters():
            grad = parameter.grad
            grad = grad.to_local() if hasattr(grad, "to_local") else grad
            square += grad.double().square().sum().item()
        self.finish()
        counts = {str(op): n for op, n in comm.get_comm_counts().items()}
        return {
            "loss": loss,
            "grad_norm": square**0.5,
            "all_gathers": sum(n for op, n in counts.items() if "allgather" in op or "all_gather" in op),
            "reduce_scatters": sum(n for op, n in counts.items() if "reduce_scatter" in op),
        }


def time_fake_group(now, shard_numel, repeats):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    large = torch.zeros(shard_numel * backend.size())
    small = torch.zeros(shard_numel)
    times = []
    for _ in range(repeats):
        start = now()
        backend._allgather_base(large, small).wait()
        backend._allgather_base(large, small).wait()
        backend._reduce_scatter_base(small, large).wait()
        times.append(now() - start)
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    for name in ["dim", "layers", "heads", "vocabulary", "sequence", "world-size"]:
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--optimizer", choices=["adamw", "none"], required=True)
    parser.add_argument("--clock", choices=["wall", "cpu"], required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    hello = {"torch": torch.__version__, "no_fsdp": NO_FSDP}
    sides = {}
    if NO_FSDP is None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
        sides = {"plain": Side(options, False), "fsdp": Side(options, True)}
        hello["parameters"] = sides["plain"].shapes
        hello["groups"] = sum(isinstance(m, FSDPModule) for m in sides["fsdp"].model.modules())
    print(json.dumps(hello), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "check":
            print(json.dumps({name: side.check() for name, side in sides.items()}), flush=True)
        elif command == "fake":
            print(time_fake_group(clock(options), *map(int, words)), flush=True)
        else:
            print(*sides[command].time(int(words[0])), flush=True)
    if NO_FSDP is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
