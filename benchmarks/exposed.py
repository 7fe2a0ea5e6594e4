"""How long a GPU computes, gathers and reduces in a profile, and how much of it at the same time."""

import statistics

import torch

COLUMNS = ["step", "computing", "gathers", "of them hidden", "reductions", "of them hidden", "exposed"]


def length(spans):
    """The time that the spans (begin, end) cover together."""
    covered, reached = 0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def kind_of(name):
    """What a kernel or copy does. Copies into and out of the buffers of collectives count as computing."""
    if not name.startswith("nccl"):
        return "computing"
    return "reductions" if "Reduce" in name else "gathers"


def times_of(spans):
    """The columns, from spans (name, begin, end), in the unit of the spans."""
    kinds = {"computing": [], "gathers": [], "reductions": []}
    for name, begin, end in spans:
        kinds[kind_of(name)].append((begin, end))
    computing, gathers, reductions = kinds.values()
    busy = length(computing)

    def hidden(some):
        return busy + length(some) - length(some + computing)

    everything = computing + gathers + reductions
    step = max(end for _, end in everything) - min(begin for begin, _ in everything)
    exposed = length(everything) - busy
    return [step, busy, length(gathers), hidden(gathers), length(reductions), hidden(reductions), exposed]


def profile(call):
    """The columns, in seconds, of what `call` makes the GPU do."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        call()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    on_gpu = [event for event in events if event.device_type() == torch.profiler.DeviceType.CUDA]
    spans = [(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_gpu]
    return [ns * 1e-9 for ns in times_of(spans)]


def medians(profiles):
    return [statistics.median(column) for column in zip(*profiles)]
