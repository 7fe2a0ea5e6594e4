"""Trains a small model on every rank of a job, with fsdp_cpp or with torch's FSDP2.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --engine torch.distributed.fsdp
"""

import argparse
import importlib

import torch
import torch.distributed as dist
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="fsdp_cpp", help="the module that has fully_shard")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    fully_shard = importlib.import_module(options.engine).fully_shard

    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(32) for _ in range(4)])
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        x = torch.randn(16, 32, generator=data)
        loss = (model(x) - x.flip(1)).square().mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {mean.item() / dist.get_world_size():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
