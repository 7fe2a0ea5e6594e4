"""The Python side of `./fsdp bench gpu`, one form per process.

Reads commands and answers each with a line:

  check      runs one step: its loss, gradient norm and collectives, as JSON
  time N     seconds per step, of N steps without the optimizer and N with it
  memory     the peak of the caching allocator over two steps, in bytes
"""

import argparse
import json
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from transformer import Transformer, check_step, fill_parameters


class Side:
    def __init__(self, options):
        with torch.device("cuda"):
            self.model = Transformer(options.dim, options.layers, options.heads, options.vocabulary)
        fill_parameters(self.model)
        self.numel = sum(p.numel() for p in self.model.parameters())
        if options.sharded:
            mesh = dist.init_device_mesh("cuda", (options.world_size,))
            policy = MixedPrecisionPolicy()
            if options.bf16:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
            fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        elif options.bf16:
            self.model.to(torch.bfloat16)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        position = torch.arange(options.sequence, device="cuda")
        self.tokens = (position * 7 % options.vocabulary).repeat(options.batch, 1)
        self.targets = (position * 11 % options.vocabulary).repeat(options.batch)

    def forward_backward(self):
        logits = self.model(self.tokens)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)).float(), self.targets)
        loss.backward()
        return loss

    def step(self, with_optimizer=True):
        self.forward_backward()
        if with_optimizer:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, steps):
        seconds = []
        for with_optimizer in [False, True]:
            self.step(with_optimizer)  # warms up
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                self.step(with_optimizer)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - start) / steps)
        return seconds

    def memory(self):
        self.step()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def check(self):
        checked = check_step(self.parameters, self.forward_backward)
        self.optimizer.zero_grad()
        return checked


def main():
    parser = argparse.ArgumentParser()
    for name in ["dim", "layers", "heads", "vocabulary", "sequence", "batch", "world-size"]:
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--bf16", type=int, required=True)
    parser.add_argument("--sharded", type=int, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.world_size)
    side = Side(options)
    groups = sum(isinstance(m, FSDPModule) for m in side.model.modules())
    print(json.dumps({"torch": torch.__version__, "numel": side.numel, "groups": groups}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "check":
            print(json.dumps(side.check()), flush=True)
        elif command == "memory":
            print(side.memory(), flush=True)
        else:
            print(*side.time(int(words[0])), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
