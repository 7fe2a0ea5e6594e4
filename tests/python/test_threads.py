"""Ranks that are threads of one process, as PyTorch's own tests have them."""

import copy
import importlib.util
import tempfile
import unittest

import pytest
import torch
import torch.distributed as dist
from parity import Mlp, batch, whole
from pool import DEVICE
from torch import nn

import fsdp_cpp

if importlib.util.find_spec("expecttest") is not None:  # which torch's base classes of tests need
    from torch.testing._internal.common_distributed import MultiThreadedTestCase
else:
    MultiThreadedTestCase = None

torch.manual_seed(0)
MODEL = nn.Sequential(*[Mlp() for _ in range(3)])  # of all ranks, whose threads share one generator


def batches(step):
    """Those of all ranks."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in range(dist.get_world_size())]
    return [torch.randn(4, 6, generator=generator) for generator in generators]


@pytest.mark.skipif(MultiThreadedTestCase is None, reason="needs expecttest")
@pytest.mark.skipif(DEVICE != "cpu", reason="the threads' group is for the host")
class Threads(MultiThreadedTestCase or unittest.TestCase):
    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_training(self):
        reference, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        for layer in (*model, model):
            fsdp_cpp.fully_shard(layer, mesh=dist.init_device_mesh("cpu", (self.world_size,)))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
        for step in range(3):
            losses = [reference(x).square().mean() for x in batches(step)]
            (sum(losses) / self.world_size).backward()
            loss = model(batch(step)).square().mean()
            loss.backward()
            torch.testing.assert_close(loss, losses[self.rank])
            for expected, param in zip(reference.parameters(), model.parameters()):
                torch.testing.assert_close(whole(param.grad), expected.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for expected, param in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(whole(param), expected.detach())

    def test_checkpoints_are_refused(self):
        with self.assertRaisesRegex((NotImplementedError, RuntimeError), "are threads of one process"):
            fsdp_cpp.save({"a": torch.ones(2)}, f"{tempfile.gettempdir()}/never_written")
