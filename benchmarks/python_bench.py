"""`./fsdp bench python`: what sharding costs Python modules, with torch's FSDP2 and with fsdp_cpp.

A step over torch's fake group, which shows the host's time and what one of many ranks computes, and a step
of real ranks over gloo or NCCL. On a GPU also how much of the communication no compute hides. All sides run
in turns in the same processes, so that a slow moment of the machine meets all of them.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import sys
import time
import warnings

import exposed
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from transformer import Transformer, batch_of, fill_parameters, loss_of

import fsdp_cpp
import fsdp_cpp.optim


@dataclasses.dataclass
class Shape:
    dim: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int


MODELS = {
    "small": Shape(64, 16, 4, 4, 256),
    "llama-60m-shapes": Shape(512, 8, 8, 2, 32_000),
    "llama-1b-shapes": Shape(2048, 16, 32, 8, 128_256),
}
PHASES = ["forward", "backward", "forward and backward", "optimizer", "step"]
COLLECTIVES = "plain, and the collectives"
SIDES = {
    "plain": (None, torch.optim.AdamW),
    "FSDP2": (torch_fully_shard, torch.optim.AdamW),
    "fsdp_cpp": (fsdp_cpp.fully_shard, torch.optim.AdamW),
    "fsdp_cpp, its AdamW": (fsdp_cpp.fully_shard, fsdp_cpp.optim.AdamW),
}


class Collectives:
    """The collectives of a sharded model beside a plain one: what remains of a step if an engine costs nothing."""

    def __init__(self, model, mesh):
        blocks = list(model.blocks)
        in_blocks = {param for block in blocks for param in block.parameters()}
        root = [param for param in model.parameters() if param not in in_blocks]
        ranks = mesh.size()
        # Of each block, and of the rest: the shard and the whole.
        self.buffers = []
        for params in [*[list(block.parameters()) for block in blocks], root]:
            numel = sum(-(-param.numel() // ranks) for param in params)
            self.buffers.append([torch.zeros(numel * n, device=mesh.device_type) for n in (1, ranks)])
        self.gathers, self.reductions = {}, []
        model.register_forward_pre_hook(lambda *_: self.before_forward(len(blocks)))
        for i, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, i=i: self.before_forward(i))
            block.register_full_backward_pre_hook(lambda *_, i=i: self.before_backward(i))
            block.register_full_backward_hook(lambda *_, i=i: self.reduce(i))

    def gather(self, i):
        shard, whole = self.buffers[i]
        return dist.all_gather_into_tensor(whole, shard, async_op=True)

    def before_forward(self, i):
        self.gather(i).wait()

    def before_backward(self, i):
        """Waits for this block's gather, and starts the one of the block before it."""
        (self.gathers.pop(i, None) or self.gather(i)).wait()
        if i > 0:
            self.gathers[i - 1] = self.gather(i - 1)

    def reduce(self, i):
        self.finish()
        shard, whole = self.buffers[i]
        self.reductions.append(dist.reduce_scatter_tensor(shard, whole, async_op=True))

    def finish(self):
        while self.reductions:
            self.reductions.pop().wait()

    def end_backward(self):
        self.reduce(len(self.buffers) - 1)
        self.finish()


class Side:
    def __init__(self, options, fully_shard, optimizer, mesh, now):
        self.now = now
        self.end_backward = lambda: None
        shape = options.shape
        with torch.device(mesh.device_type):
            self.model = Transformer(shape.dim, shape.layers, shape.heads, shape.vocabulary, key_heads=shape.key_heads)
        fill_parameters(self.model)
        low = torch.bfloat16 if options.dtype == "bf16" else None
        if fully_shard is Collectives:
            self.end_backward = Collectives(self.model, mesh).end_backward
        elif fully_shard:
            how = {"mesh": mesh, "reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(param_dtype=low)}
            for block in self.model.blocks:
                fully_shard(block, **how)
            fully_shard(self.model, **how)
        elif low:
            self.model.to(low)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-5, fused=True)
        batch = batch_of(1, options.sequence, shape.vocabulary, dist.get_rank())
        self.batch = [part.to(mesh.device_type) for part in batch]

    def step(self):
        begin = self.now()
        loss = loss_of(self.model, self.batch)
        forward = self.now()
        loss.backward()
        self.end_backward()
        backward = self.now()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = self.now()
        return [forward - begin, backward - forward, backward - begin, end - backward, end - begin]


def peak_memory(options, mesh, how):
    """The bytes on the GPU of a side that is there alone."""
    side = Side(options, *how, mesh, synchronized)
    side.step()
    torch.cuda.reset_peak_memory_stats()
    side.step()
    peak = torch.cuda.max_memory_allocated()
    del side
    gc.collect()
    return peak


def measure(options, device, now, more=()):
    """The median seconds of each phase, by side, and the peak memory in bytes if it is known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    peaks = {name: peak_memory(options, mesh, how) for name, how in SIDES.items()} if device == "cuda" else {}
    sides = {name: Side(options, *how, mesh, now) for name, how in (*SIDES.items(), *more)}
    steps = {name: [] for name in sides}
    for _ in range(options.rounds + 1):
        for name, side in sides.items():
            side.step()
            steps[name] += [side.step() for _ in range(options.steps)]
    medians = {
        name: [statistics.median(phase) for phase in zip(*times[options.steps :])]
        for name, times in steps.items()
    }
    return medians, peaks


def row(name, cells):
    print(f"| {name} | " + " | ".join(cells) + " |")


def show_times(title, options, columns, result):
    """Begins a table: a row of times for each side."""
    shape = options.shape
    print(f"{title}, {shape.layers} blocks of dim {shape.dim}, {options.sequence} tokens, {options.dtype}\n")
    row("", columns)
    row("---", ["---"] * len(columns))
    for name, times in result.items():
        row(name, [f"{seconds * 1e3:.1f} ms" for seconds in times])


def show(title, options, result, peaks):
    plain, theirs = result["plain"], result["FSDP2"]
    show_times(title, options, PHASES, result)
    for name in list(result)[2:]:
        row(f"{name} / FSDP2", [f"{ours / other:.2f}" for ours, other in zip(result[name], theirs)])
    for name in list(result)[2:]:
        added = [(ours - base) / (other - base) for ours, other, base in zip(result[name], theirs, plain)]
        row(f"({name} - plain) / (FSDP2 - plain)", [f"{ratio:.2f}" for ratio in added])
    if peaks:
        print("\nPeak memory: " + ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in peaks.items()))
    print(flush=True)


def synchronized():
    torch.cuda.synchronize()
    return time.perf_counter()


def fake_step(_, options):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.fake_ranks)
    now = synchronized if options.device == "cuda" else time.process_time
    show(f"{options.fake_ranks} ranks of which one runs (fake)", options, *measure(options, options.device, now))


def on_rank_0(rank, call):
    """Makes the call on rank 0, while the others wait."""
    if rank == 0:
        call()
    dist.barrier()


def overlap(options):
    """Profiles steps of the sharded sides in turns: the medians over rounds and ranks, by side."""
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    names = [name for name, (shard, _) in SIDES.items() if shard]
    sides = {name: Side(options, *SIDES[name], mesh, time.perf_counter) for name in names}
    profiles = {name: [] for name in names}
    for i in range(options.rounds + 2):
        for name, side in sides.items():
            dist.barrier()
            profile = exposed.profile(side.step)
            if i >= 2:
                profiles[name].append(profile)
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, profiles)
    return {name: exposed.medians([profile for rank in of_ranks for profile in rank[name]]) for name in names}


def show_overlap(options, result):
    show_times(f"{options.ranks} ranks over nccl, on the GPU", options, exposed.COLUMNS, result)
    for name in list(result)[1:]:
        row(f"{name} / FSDP2", [f"{ours / theirs:.2f}" for ours, theirs in zip(result[name], result["FSDP2"])])
    print(flush=True)


def real_step(rank, options):
    backend, now = "gloo", time.perf_counter
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        backend, now = "nccl", synchronized
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=options.ranks)
    if options.only in (None, "step"):
        more = [(COLLECTIVES, (Collectives, torch.optim.AdamW))] if options.dtype == "fp32" else []
        result = measure(options, options.device, now, more)
        on_rank_0(rank, lambda: show(f"{options.ranks} ranks over {backend}", options, *result))
    if options.only in (None, "overlap") and backend == "nccl" and options.ranks > 1:
        result = overlap(options)
        on_rank_0(rank, lambda: show_overlap(options, result))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8, help="of each side per round")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dim", type=int, help="of the model, if not its own")
    parser.add_argument("--layers", type=int, help="of the model, if not its own")
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of compute; shards are fp32")
    parser.add_argument("--fake-ranks", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2, help="of the step with real ranks")
    parser.add_argument("--port", type=int, default=29671)
    parser.add_argument("--only", choices=["fake", "step", "overlap"])
    options = parser.parse_args()
    if options.only == "overlap" and (options.device != "cuda" or options.ranks < 2):
        parser.error("--only overlap needs --device cuda and two or more --ranks")
    own = {name: value for name, value in (("dim", options.dim), ("layers", options.layers)) if value}
    options.shape = dataclasses.replace(MODELS[options.model], **own)
    # Otherwise glibc gives memory back to the system and gets it again, page by page, at moments that
    # differ from run to run. A GPU's allocator does not either.
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(1 << 29), MALLOC_MMAP_THRESHOLD_=str(1 << 29))
    if options.only in (None, "fake"):
        multiprocessing.spawn(fake_step, (options,), nprocs=1)
    if options.only != "fake":
        multiprocessing.spawn(real_step, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    sys.exit(main())
