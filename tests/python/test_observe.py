"""What fsdp_cpp.observe sees of a training."""

import contextlib
import json
import threading

import pytest
import torch
import torch.distributed as dist
from parity import Collectives, batch, mesh_of, sharded_mlps
from pool import DEVICE

import fsdp_cpp
from fsdp_cpp.observe import Run, Trace, memory_stats, reset_peak_memory_stats, sharding_plan


def memory():
    memory_stats(DEVICE)  # begins to count
    model = sharded_mlps(fsdp_cpp, reshard_after_forward=True)
    inside = []
    model[1].register_forward_pre_hook(lambda *_: inside.append(memory_stats(DEVICE)))
    at_rest = memory_stats(DEVICE)
    elements = sum(param.to_local().numel() for param in model.parameters())
    assert at_rest.shards == 4 * elements
    assert at_rest.gathered == at_rest.gradients == 0
    reset_peak_memory_stats(DEVICE)
    model(batch(0)).sum().backward()
    assert inside[0].gathered >= 4 * sum(param.numel() for param in model[1].parameters())
    after = memory_stats(DEVICE)
    assert after.gathered == 0 and after.gradients == 4 * elements
    assert after.peak >= after.allocated


def test_memory(ranks):
    ranks(2).run(memory)


def plan():
    """It says what a step then does."""
    memory_stats(DEVICE)  # begins to count
    model = sharded_mlps(fsdp_cpp, layers=2, mesh=mesh_of(2, 2))
    groups = {group.module: group for group in sharding_plan(model).groups}
    assert list(groups) == ["0", "1"]  # the root has no parameters of its own
    assert sharding_plan(model).total().shard_bytes == memory_stats(DEVICE).shards
    calls = Collectives()
    with calls:
        model(batch(0)).sum().backward()
    if DEVICE == "cpu":
        total = sharding_plan(model).total()
        sent = [(name, 4 * max(size for size, _ in sizes)) for group in calls.calls.values() for name, sizes in group]
        for name, count, size in (
            ("c10d::_allgather_base_", total.all_gathers, total.all_gather_bytes),
            ("c10d::_reduce_scatter_base_", total.reduce_scatters, total.reduce_scatter_bytes),
            ("c10d::allreduce_", total.all_reduces, total.all_reduce_bytes),
        ):
            found = [size for op, size in sent if op == name]
            assert (len(found), sum(found)) == (count, size), name
    lines = str(sharding_plan(model)).splitlines()
    assert [line.split()[0] for line in lines] == ["module", "0", "1", "total"]


def test_plan(ranks):
    ranks(4).run(plan)


def timeline(path):
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()
    with Trace(DEVICE) as trace:
        for step in range(2):
            trace.begin_step(step)
            model(batch(step)).sum().backward()
    trace.write(path)
    dist.barrier()
    assert trace.waited_s > 0
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    for rank in range(dist.get_world_size()):
        names = [event["name"] for event in events if event["pid"] == rank]
        assert {"step 0", "step 1"} <= set(names), names
        for layer in range(3):
            assert {f"all_gather {layer}", f"reduce_scatter {layer}", f"pre_backward {layer}"} <= set(names), names
    assert all(event["ts"] >= 0 for event in events if "ts" in event)


def test_timeline_of_all_ranks(ranks, tmp_path):
    ranks(2).run(timeline, str(tmp_path / "trace.json"))


def five_steps(folder, model, fails=False):
    with Run(folder, model, device=DEVICE, traced=range(2, 4), lr=0.5) as run:
        for step in range(5):
            model(batch(step)).sum().backward()
            run.step(loss=float("nan") if step == 1 else 3 - step, tokens=8, lr=0.5)
        if fails:
            raise ZeroDivisionError
    return run


def page(folder):
    model = sharded_mlps(fsdp_cpp)
    with pytest.raises(ZeroDivisionError):
        five_steps(folder, model, fails=True)
    run = five_steps(folder, model)
    dist.barrier()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [3, None, 1, 0, -1]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["tokens"] == 40 and lines[-1]["memory"]["shards"] > 0
    traced = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in traced} == {0, 1}
    assert {event["name"] for event in traced if event.get("cat") == "step"} == {"step 2", "step 3"}
    text = (run.folder / "report.html").read_text()
    assert '"gathered_bytes"' in text and '"lr":0.5' in text and "reduce_scatter" in text


def test_page_about_a_run(ranks, tmp_path):
    ranks(2).run(page, str(tmp_path / "run"))


def beside_a_trace(folder):
    """Rank 0 has a Trace of its own, and the norms of gradients are DTensors."""
    model = sharded_mlps(fsdp_cpp)
    with Trace(DEVICE) if dist.get_rank() == 0 else contextlib.nullcontext() as own:
        with Run(folder, model, device=DEVICE, traced=range(2, 4)) as run:
            for step in range(4):
                loss = model(batch(step)).sum()
                loss.backward()
                run.step(loss=loss, grad_norm=torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                assert own is None or own.is_recording()
    dist.barrier()
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and all(line["grad_norm"] > 0 and line["loss"] is not None for line in lines)
    traced = json.loads((run.folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in traced} == {1}


def test_page_beside_a_trace(ranks, tmp_path):
    ranks(2).run(beside_a_trace, str(tmp_path / "run"))


def misuse():
    trace = Trace(DEVICE)
    with pytest.raises(RuntimeError, match="inside of its with statement"):
        trace.begin_step(0)
    with trace:
        with pytest.raises(RuntimeError, match="Trace"):
            Trace(DEVICE).__enter__()
        thread = threading.Thread(target=lambda: pytest.raises(RuntimeError, trace.begin_step, 0))
        thread.start()
        thread.join()
    forgotten = [Trace(DEVICE).__enter__()]
    thread = threading.Thread(target=forgotten.clear)  # drops it in another thread
    thread.start()
    thread.join()
    model = sharded_mlps(fsdp_cpp)
    model(batch(0)).sum().backward()  # works as if there had been no Trace


def test_misuse(ranks):
    ranks(2).run(misuse)
