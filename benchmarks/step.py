"""One rank of the Python side of `./fsdp bench step`, which starts this program.

Prints "ready". Then it reads commands, "plain N" or "fsdp N", and answers each with a line: the
median seconds of N steps, and the losses of the model's first steps.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ranks import join
from transformer import Transformer, batch_of, fill_parameters, loss_of

HEADS = 4
VOCABULARY = 256
FIRST_STEPS = 3


class Side:
    def __init__(self, options, sharded):
        self.model = Transformer(options.dim, options.layers, HEADS, VOCABULARY)
        fill_parameters(self.model)
        if sharded:
            mesh = dist.init_device_mesh("cpu", (options.world_size,))
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.batch = batch_of(options.batch, options.sequence, VOCABULARY, options.rank)
        self.losses = [self.step() for _ in range(FIRST_STEPS)]

    def step(self):
        loss = loss_of(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def time(self, steps):
        self.step()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def main():
    parser = argparse.ArgumentParser()
    for name in ["rank", "world-size", "port", "dim", "layers", "batch", "sequence"]:
        parser.add_argument("--" + name, type=int, required=True)
    options = parser.parse_args()
    join(options, threads=1)
    sides = {"plain": Side(options, False), "fsdp": Side(options, True)}
    print("ready", flush=True)
    for line in sys.stdin:
        form, steps = line.split()
        print(sides[form].time(int(steps)), *sides[form].losses, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
