"""`./fsdp bench python`: what sharding costs Python modules, with torch's FSDP2 and with fsdp_cpp.

The host's time of a step over torch's fake group, and a step of real ranks over gloo. All sides run
in turns in the same processes, so that a slow moment of the machine meets all of them.
"""

import argparse
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformer import Transformer, batch_of, fill_parameters, loss_of

import fsdp_cpp
import fsdp_cpp.optim

HEADS = 4
VOCABULARY = 256
PHASES = ["forward", "backward", "optimizer", "step"]
SIDES = {
    "plain": (None, torch.optim.AdamW),
    "FSDP2": (torch_fully_shard, torch.optim.AdamW),
    "fsdp_cpp": (fsdp_cpp.fully_shard, torch.optim.AdamW),
    "fsdp_cpp, its AdamW": (fsdp_cpp.fully_shard, fsdp_cpp.optim.AdamW),
}


class Side:
    def __init__(self, options, fully_shard, optimizer, mesh, now):
        self.now = now
        self.model = Transformer(options.dim, options.layers, HEADS, VOCABULARY)
        fill_parameters(self.model)
        if fully_shard:
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-5, fused=True)
        self.batch = batch_of(1, options.sequence, VOCABULARY, dist.get_rank())

    def step(self):
        times = [self.now()]
        loss = loss_of(self.model, self.batch)
        times.append(self.now())
        loss.backward()
        times.append(self.now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self.now())
        phases = [end - begin for begin, end in zip(times, times[1:])]
        return [*phases, times[-1] - times[0]]


def measure(options, now):
    """The median seconds of each phase, by side."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sides = {name: Side(options, *how, mesh, now) for name, how in SIDES.items()}
    steps = {name: [] for name in sides}
    for _ in range(options.rounds + 1):
        for name, side in sides.items():
            side.step()
            steps[name] += [side.step() for _ in range(options.steps)]
    return {
        name: [statistics.median(phase) for phase in zip(*times[options.steps :])]
        for name, times in steps.items()
    }


def show(title, result):
    print(f"{title}\n\n| | " + " | ".join(PHASES) + " | added to plain, of FSDP2's | step, of FSDP2's |")
    print("|---|" + "---|" * (len(PHASES) + 2))
    plain, theirs = result["plain"], result["FSDP2"]
    for name, phases in result.items():
        row = [f"{seconds * 1e3:.2f} ms" for seconds in phases]
        is_sharded = name != "plain"
        row.append(f"{(phases[-1] - plain[-1]) / (theirs[-1] - plain[-1]):.2f}" if is_sharded else "")
        row.append(f"{phases[-1] / theirs[-1]:.2f}" if is_sharded else "")
        print(f"| {name} | " + " | ".join(row) + " |")
    added = [ours - base for ours, base in zip(result["fsdp_cpp"], plain)]
    theirs_added = [torch_s - base for torch_s, base in zip(theirs, plain)]
    both = sum(added[:2]) / sum(theirs_added[:2])
    print(f"\nForward and backward alone: {both:.2f} of what FSDP2 adds.\n", flush=True)


def host_cost(_, options):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.fake_ranks)
    result = measure(options, time.process_time)
    show(f"Host time, {options.fake_ranks} ranks of which one runs (fake), {options.layers} blocks of dim {options.dim}", result)


def real_step(rank, options):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=2)
    result = measure(options, time.perf_counter)
    if rank == 0:
        show(f"A step of 2 ranks over gloo, {options.layers} blocks of dim {options.dim}", result)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="of each side per round")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--fake-ranks", type=int, default=8)
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument("--only", choices=["host", "step"])
    options = parser.parse_args()
    if options.only != "step":
        multiprocessing.spawn(host_cost, (options,), nprocs=1)
    if options.only != "host":
        multiprocessing.spawn(real_step, (options,), nprocs=2)


if __name__ == "__main__":
    sys.exit(main())
