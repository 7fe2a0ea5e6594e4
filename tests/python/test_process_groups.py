"""The process groups below a sharded model: what ranks compare, what they make, and what goes when."""

import datetime
import gc
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from parity import ENGINES, batch, compare, mesh_of, sharded_mlps, train
from pool import DEVICE

import fsdp_cpp


def ranks_that_disagree():
    torch.manual_seed(0)
    model = sharded_mlps(fsdp_cpp, layers=2)
    # Either order: a rank may be ahead of the other.
    with pytest.raises(RuntimeError, match="(?s)(module '0'.*module '1'|module '1'.*module '0')"):
        for step in range(5):
            first, second = (model[0], model[1]) if dist.get_rank() == 0 else (model[1], model[0])
            model.forward = lambda x, first=first, second=second: second(first(x))
            model(batch(step)).sum().backward()


def test_ranks_that_call_other_modules(ranks):
    ranks(2).run(ranks_that_disagree)


def a_rank_that_is_late():
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    model = sharded_mlps(fsdp_cpp, mesh=dist.DeviceMesh.from_group(group, DEVICE))
    model(batch(0)).sum().backward()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="(?s)for module '0'.* failed on rank 0 .*: rank 1 is late or gone, or still waiting; "):
            model(batch(1))
    else:
        time.sleep(9)
    dist.barrier()  # of the world, where nothing has failed


@pytest.mark.skipif(DEVICE != "cpu", reason="NCCL ends the process")
def test_the_error_names_a_rank_that_is_late(ranks):
    ranks(2).run(a_rank_that_is_late)


def one_forward_more():
    """Rank 0 makes a forward that rank 1 does not make. Each says where it is, and where the other one is."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    model = sharded_mlps(fsdp_cpp, mesh=dist.DeviceMesh.from_group(group, DEVICE))
    for step in range(2):
        model(batch(step)).sum().backward()
    other = 1 - dist.get_rank()
    with pytest.raises(RuntimeError, match=f"(?s)for module '.* on rank {other} the call that failed is .* of module '"):
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch(9))
        for step in range(6):
            model(batch(step)).sum().backward()
    dist.barrier()  # of the world, where nothing has failed


@pytest.mark.skipif(DEVICE != "cpu", reason="NCCL ends the process")
def test_one_rank_makes_a_forward_more(ranks):
    ranks(2).run(one_forward_more)


def one_rank_drops_a_model():
    kept = []
    for _ in range(3):
        model = sharded_mlps(fsdp_cpp)
        for step in range(3):
            model(batch(step)).sum().backward()
        if dist.get_rank() == 0:
            kept.append(model)
        del model
        gc.collect()


def test_ranks_that_drop_a_model_at_other_times(ranks):
    ranks(2).run(one_rank_drops_a_model)


def other_numbers_of_groups():
    """Ranks that are in more groups than others still find the ones that they make together."""
    if dist.get_rank() in (0, 2):
        dist.new_group([0, 2], use_local_synchronization=True)

    def make(engine):
        model = sharded_mlps(engine, reshard_after_forward=2)
        if engine is fsdp_cpp:  # with torch's engine this hangs
            model.set_separate_reduce_scatter_group()
        return model

    compare(make, collectives=False)


def test_ranks_with_other_numbers_of_groups(ranks):
    ranks(4).run(other_numbers_of_groups)


def groups_that_end():
    """Threads and open files go with their group."""

    def used():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    counts = []
    for _ in range(6):
        group = dist.new_group()
        mesh = dist.DeviceMesh.from_group(group, DEVICE)
        model = sharded_mlps(fsdp_cpp, mesh=mesh)
        model(batch(0)).sum().backward()
        del model, mesh
        gc.collect()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        counts.append(used())
    for each in zip(*counts):
        assert min(each[3:]) <= max(each[:3]), counts  # a socket may end a moment later


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the threads of gloo")
def test_groups_that_end(ranks):
    ranks(2).run(groups_that_end)


def a_thread_that_waits_for_the_store():
    """A thread of the user's may wait for a key all through a training, for a sign to stop, for example."""
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()
    key = "a thread waits for this"
    store = dist.distributed_c10d._get_default_store()
    waited = []
    waiting = threading.Thread(target=lambda: waited.append(store.wait([key], datetime.timedelta(seconds=30))))
    if dist.get_rank() == 0:
        waiting.start()
        time.sleep(0.5)
    for step in range(3):
        model(batch(step)).sum().backward()
    if dist.get_rank() == 1:
        store.set(key, "")
    else:
        waiting.join()
        assert waited == [None]  # else it waited for the whole time, and the training with it


def test_a_thread_that_waits_for_the_store(ranks):
    ranks(2).run(a_thread_that_waits_for_the_store)


DONE_FIRST = """
import sys, time
import torch
import torch.distributed as dist
import fsdp_cpp

rank = int(sys.argv[1])
dist.init_process_group("gloo", f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
model = fsdp_cpp.fully_shard(torch.nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (2,)))
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
model.register_forward_hook(lambda *_: time.sleep(2 * rank), prepend=True)
with torch.no_grad():
    print(model(torch.ones(2, 4)).shape)
"""


def test_a_rank_that_is_done_first():
    """The process of rank 0 has the store, and ends while rank 1 is in its last forward."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DONE_FIRST, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    for process in processes:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
