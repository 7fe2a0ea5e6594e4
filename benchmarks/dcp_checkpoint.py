"""The Python side of `./fsdp bench checkpoint`, which starts this program once per rank.

Prints "ready TORCH BYTES_OF_SHARD". Then it reads commands and answers each with a line "SECONDS
TOTAL EXTRA BESIDE":

  save PATH    torch.distributed.checkpoint.save with its defaults
  load PATH    load, into parameters that are set to zero first and checked afterwards
  async PATH   async_save: SECONDS until the call returns, TOTAL until the checkpoint is complete

EXTRA is the most resident memory during the command, in bytes, beyond that before the command; for
async, beyond that of the model. It is -1 if the kernel does not report it. BESIDE is the time of
compute during async / its time without a save.
"""

import argparse
import ctypes
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

SMALL = 16  # elements of a small tensor

# checkpoint_rank.h has the same model and the same compute: change both.


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class Model(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(blocks):  # the whole model is never in memory
            self.blocks.append(fully_shard(Block(width)))


def memory(field):
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return -1


def reset_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


def trim():
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        pass


def shards(state):
    return [tensor.to_local() for tensor in state.values()]


def checksum(state):
    return sum(shard.sum(dtype=torch.double).item() for shard in shards(state))


class Compute:
    """Matrix products, each of which keeps one core busy for some milliseconds."""

    def __init__(self, width):
        self.factors = torch.ones(width // 2, width // 2)
        self.product = torch.zeros_like(self.factors)
        torch.mm(self.factors, self.factors, out=self.product)

    def seconds(self, goes_on):
        """Computes as long as goes_on(seconds so far). Returns the mean seconds of one product."""
        start = time.monotonic()
        count = seconds = 0
        while count == 0 or goes_on(seconds):
            torch.mm(self.factors, self.factors, out=self.product)
            count += 1
            seconds = time.monotonic() - start
        return seconds / count


def run(command, path, state, model_bytes, compute):
    expected = checksum(state)
    alone = compute.seconds(lambda seconds: seconds < 0.5) if command == "async" else 1
    beside = 1
    if command == "load":
        for shard in shards(state):
            shard.zero_()
    trim()
    dist.barrier()
    before = model_bytes if command == "async" else memory("VmRSS")
    is_known = reset_peak()
    start = time.monotonic()
    if command == "save":
        dcp.save(state, checkpoint_id=path)
    elif command == "load":
        dcp.load(state, checkpoint_id=path)
    else:
        future = dcp.async_save(state, checkpoint_id=path)
    seconds = total = time.monotonic() - start
    if command == "async":
        beside = compute.seconds(lambda _: not future.done()) / alone
        future.result()
        total = time.monotonic() - start
    extra = memory("VmHWM") - before if is_known else -1
    assert checksum(state) == expected, "the tensors have changed"
    return seconds, total, extra, beside


def main():
    parser = argparse.ArgumentParser()
    for name in ["rank", "ranks", "width", "blocks", "tensors"]:
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method="file://" + options.rendezvous, rank=options.rank, world_size=options.ranks
    )
    with torch.no_grad():
        model = Model(options.width, options.blocks)
        state = get_model_state_dict(model) if options.blocks else {}
        mesh = init_device_mesh("cpu", (options.ranks,))
        for i in range(options.tensors):
            whole = torch.full((SMALL,), i % 100.0)
            state[f"layers.{i}.weight"] = distribute_tensor(whole, mesh, [Shard(0)])
        compute = Compute(options.width)
        trim()
        model_bytes = memory("VmRSS")
        print("ready", torch.__version__, sum(shard.nbytes for shard in shards(state)), flush=True)
        for line in sys.stdin:
            command, path = line.split(maxsplit=1)
            print(*run(command, path.strip(), state, model_bytes, compute), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
