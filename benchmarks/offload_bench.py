"""`./fsdp bench offload`: GPU memory against step time, for parameters in host memory, with torch's FSDP2 and with fsdp_cpp.

One of several ranks runs, over torch's fake group: the copies between host and GPU are real, the collectives are not.
Each way to train runs in a process of its own, so that its peak of memory is its own.
"""

import argparse
import contextlib
import dataclasses
import os
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.multiprocessing as multiprocessing
from python_bench import MODELS, row
from transformer import Transformer, batch_of, fill_parameters, loss_of

import fsdp_cpp
import fsdp_cpp.optim
from fsdp_cpp.offload import CPUOffloadPolicy, DeviceBudget, StepInBackward


@dataclasses.dataclass
class Way:
    """How to train. `kept` is the part of shards, gradients and optimizer that stays on the GPU."""

    name: str
    ours: bool = True
    kept: float = 0
    in_backward: bool = False


WAYS = [
    Way("FSDP2, on the GPU", ours=False, kept=1),
    Way("fsdp_cpp, on the GPU", kept=1),
    Way("FSDP2, offloaded", ours=False),
    Way("fsdp_cpp, offloaded"),
    Way("fsdp_cpp, offloaded, StepInBackward", in_backward=True),
    *[Way(f"... with {kept:.0%} on the GPU", kept=kept, in_backward=True) for kept in (0.25, 0.5, 0.75)],
]


def shard(model, way, options, mesh):
    engine = fsdp_cpp if way.ours else torch_fsdp
    pin = options.device == "cuda"
    numel = sum(-(-param.numel() // mesh.size()) for param in model.parameters())
    budget = DeviceBudget(int(way.kept * 16 * numel))  # fp32: a shard, its gradient, two moments
    policy = CPUOffloadPolicy(pin, budget) if way.ours else torch_fsdp.CPUOffloadPolicy(pin)
    how = {
        "mesh": mesh,
        "mp_policy": engine.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": engine.OffloadPolicy() if way.kept == 1 else policy,
    }
    for block in model.blocks:
        engine.fully_shard(block, **how)
    engine.fully_shard(model, **how)


def train(_, number, options, pipe):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    mesh = dist.init_device_mesh(options.device, (options.ranks,))
    way, shape = WAYS[number], options.shape
    model = Transformer(shape.dim, shape.layers, shape.heads, shape.vocabulary, key_heads=shape.key_heads)
    fill_parameters(model)
    shard(model, way, options, mesh)
    make = fsdp_cpp.optim.AdamW if way.ours else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-5, fused=True)
    updates = StepInBackward(model, optimizer) if way.in_backward else contextlib.nullcontext()
    batch = [part.to(options.device) for part in batch_of(options.rows, options.sequence, shape.vocabulary, 0)]
    on_gpu = options.device == "cuda"

    def now():
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    times = []
    with updates:
        for step in range(options.warm_up + options.steps):
            if on_gpu and step == options.warm_up:
                torch.cuda.reset_peak_memory_stats()
            begin = now()
            loss_of(model, batch).backward()
            after = now()
            if way.in_backward:
                updates.finish()
            else:
                optimizer.step()
                optimizer.zero_grad()
            end = now()
            times.append((after - begin, end - after, end - begin))
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    pipe.put((peak, [statistics.median(phase) for phase in zip(*times[options.warm_up :])]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, default="llama-1b-shapes")
    parser.add_argument("--ranks", type=int, default=4, help="of which one runs")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2)
    options = parser.parse_args()
    options.shape = MODELS[options.model]
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    tokens = options.rows * options.sequence
    print(f"{options.model}, one of {options.ranks} ranks, {tokens} tokens, bf16 with shards in fp32, {options.device}\n")
    row("", ["GPU memory", "forward and backward", "then, optimizer", "step", "step / FSDP2's"])
    row("---", ["---"] * 5)
    theirs = None
    for number, way in enumerate(WAYS):
        pipe = multiprocessing.get_context("spawn").SimpleQueue()
        multiprocessing.spawn(train, (number, options, pipe), nprocs=1)
        peak, seconds = pipe.get()
        if not way.ours:
            theirs = seconds[-1]
        cells = [f"{peak / 2**30:.2f} GiB", *(f"{each * 1e3:.0f} ms" for each in seconds)]
        row(way.name, [*cells, f"{seconds[-1] / theirs:.2f}"])
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
