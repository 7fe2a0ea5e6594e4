"""Code that the Python sides of `bench step` and `bench train` share: one process per rank."""

import warnings

import torch
import torch.distributed as dist


def join(options, threads):
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=options.world_size,
    )
