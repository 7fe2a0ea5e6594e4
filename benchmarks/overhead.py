"""The Python side of `./fsdp bench overhead`, which starts this program.

Reads commands and answers each with a line:

  check      one step of both models: its loss, gradient norm and collectives, as JSON
  plain N    N steps of the plain model: median seconds of the step, of forward and backward, and
             of the optimizer
  fsdp N     the same with fully_shard
  phases N   N steps with fully_shard: median seconds inside the functions of FSDP2, by phase
  fake M N   torch's fake group alone: median seconds of the collectives of a group in one step,
             with shards of M elements, over N repetitions
"""

import argparse
import json
import statistics
import sys
import time
import warnings

import torch
import torch.distributed as dist
from transformer import Transformer, batch_of, check_step, fill_parameters, loss_of

try:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.testing._internal.distributed.fake_pg import FakeStore

    NO_FSDP = None
except ImportError as error:
    NO_FSDP = str(error)


def clock(options):
    return time.process_time if options.clock == "cpu" else time.perf_counter


class Side:
    """A model, plain or sharded, and its training step."""

    def __init__(self, options, sharded):
        self.now = clock(options)
        self.model = Transformer(
            options.dim, options.layers, options.heads, options.vocabulary, options.params_per_group
        )
        fill_parameters(self.model)
        self.shapes = {name: list(p.shape) for name, p in self.model.named_parameters()}
        if sharded:
            how = {
                "mesh": dist.init_device_mesh("cpu", (options.world_size,)),
                "reshard_after_forward": True,
            }
            if options.dtype == "bf16":
                how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in self.model.blocks:
                fully_shard(block, **how)
            fully_shard(self.model, **how)
        elif options.dtype == "bf16":
            self.model.to(torch.bfloat16)  # so that plain and sharded model compute the same
        self.optimizer = None
        if options.optimizer == "adamw":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        else:
            self.parameters = list(self.model.parameters())
        self.batch = batch_of(1, options.sequence, options.vocabulary)

    def forward_backward(self):
        loss = loss_of(self.model, self.batch)
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
        return [statistics.median(column) for column in zip(*times[1:])]  # the first step warms up

    def check(self):
        checked = check_step(self.model.parameters(), self.forward_backward)
        self.finish()
        return checked


PHASES = ["pre_forward", "post_forward", "pre_backward", "post_backward", "final"]


class PhaseClock:
    """While entered, adds up the time inside the functions of FSDP2, by phase.

    Each instant counts for the innermost function.
    """

    def __init__(self, now):
        self.now = now
        self.inside = []
        self.since = 0.0
        self.times = dict.fromkeys(PHASES, 0.0)
        self.functions = [(FSDPParamGroup, phase, phase) for phase in PHASES[:-1]]
        self.functions.append((FSDPState, "_root_post_backward_final_callback", "final"))
        self.originals = [getattr(owner, name) for owner, name, _ in self.functions]

    def charge(self):
        time = self.now()
        if self.inside:
            self.times[self.inside[-1]] += time - self.since
        self.since = time

    def timed(self, function, phase):
        def call(*args, **kwargs):
            self.charge()
            self.inside.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.charge()
                self.inside.pop()

        return call

    def __enter__(self):
        for (owner, name, phase), function in zip(self.functions, self.originals):
            setattr(owner, name, self.timed(function, phase))
        return self

    def __exit__(self, *_):
        for (owner, name, _), function in zip(self.functions, self.originals):
            setattr(owner, name, function)

    def take(self):
        times, self.times = self.times, dict.fromkeys(PHASES, 0.0)
        return [times[phase] for phase in PHASES]


def time_phases(now, side, steps):
    times = []
    with PhaseClock(now) as phases:
        for _ in range(steps + 1):
            side.forward_backward()
            side.finish()
            times.append(phases.take())
    return [statistics.median(column) for column in zip(*times[1:])]


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
    for name in ["dim", "layers", "heads", "vocabulary", "params-per-group", "sequence", "world-size"]:
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], required=True)
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
        elif command == "phases":
            print(*time_phases(clock(options), sides["fsdp"], int(words[0])), flush=True)
        elif command == "fake":
            print(time_fake_group(clock(options), *map(int, words)), flush=True)
        else:
            print(*sides[command].time(int(words[0])), flush=True)
    if NO_FSDP is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
