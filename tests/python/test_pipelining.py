"""Schedules of torch.distributed.pipelining whose stages are sharded or replicated, with both engines."""

import functools

import pytest
import torch
import torch.distributed as dist
from parity import ENGINES, Mlp, needs_torch_2_13, whole
from pool import DEVICE
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import fsdp_cpp

MICROBATCHES = 4
SCHEDULES = {"GPipe": (ScheduleGPipe, 1), "1F1B": (Schedule1F1B, 1), "interleaved 1F1B": (ScheduleInterleaved1F1B, 2)}


@functools.cache
def pipeline_mesh():
    return dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pipeline", "data"))


def train_in_stages(engine, schedule_class, stages_per_rank, api):
    """Returns losses, gradients and parameters of this rank's stages after three steps."""
    mesh = pipeline_mesh()
    place, count = mesh.get_local_rank("pipeline"), 2 * stages_per_rank
    stages, models, optimizers = [], [], []
    for index in range(place, count, 2):
        torch.manual_seed(index)
        model = nn.Sequential(Mlp(), Mlp()).to(DEVICE)
        for layer in (*model, model):
            getattr(engine, api)(layer, mesh=mesh["data"])
        models.append(model)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=1e-2))
        device = torch.device(DEVICE)
        stages.append(PipelineStage(model, index, count, device, group=mesh.get_group("pipeline")))
    schedule = schedule_class(
        stages if stages_per_rank > 1 else stages[0], MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean()
    )
    seen = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank("data"))
        x, target = torch.randn(2, 8, 6, generator=generator).to(DEVICE)
        losses: list = []
        schedule.step(
            *[x] if place == 0 else [],
            target=target if place == 1 else None,
            losses=losses if place == 1 else None,
        )
        seen += [loss.detach().clone() for loss in losses]
        for model, optimizer in zip(models, optimizers):
            seen += [whole(param.grad) for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return seen + [whole(param) for model in models for param in model.parameters()]


def pipelined(schedule, api):
    results = []
    for which, engine in ENGINES.items():
        undo = fsdp_cpp.patch_torch() if which == "fsdp_cpp" else None
        try:
            results.append(train_in_stages(engine, *SCHEDULES[schedule], api))
        finally:
            if undo:
                undo()
    theirs, ours = results
    assert len(theirs) == len(ours)
    for expected, value in zip(theirs, ours):
        assert torch.equal(expected, value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_that_are_sharded(ranks, schedule):
    ranks(4).run(pipelined, schedule, "fully_shard")


@needs_torch_2_13
@pytest.mark.parametrize("schedule", ["1F1B", "interleaved 1F1B"])
def test_stages_that_are_replicated(ranks, schedule):
    ranks(4).run(pipelined, schedule, "replicate")
