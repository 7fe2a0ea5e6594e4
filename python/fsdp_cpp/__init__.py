"""PyTorch's FSDP2 on the C++ engine of fsdp.cpp.

    from fsdp_cpp import fully_shard  # in the place of torch.distributed.fsdp
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ._build import TORCH_VERSION, VERSION as __version__  # type: ignore[import-not-found]

if torch.__version__.split("+")[0] != TORCH_VERSION:
    raise ImportError(
        f"fsdp_cpp was built for torch {TORCH_VERSION}, and this is torch {torch.__version__}: "
        "build it again for this torch (./fsdp python)"
    )

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ._checkpoint import async_save, load, save
from ._fully_shard import replicate
from ._module import (
    FSDPModule,
    ReplicateModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._patch import patch_torch
from .offload import CPUOffloadPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import fully_shard  # the same signature, with its overloads
else:
    from ._fully_shard import fully_shard

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # torch before 2.12
    DataParallelMeshDims = None  # type: ignore[assignment,misc]

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "UnshardHandle",
    "async_save",
    "fully_shard",
    "load",
    "patch_torch",
    "register_fsdp_forward_method",
    "replicate",
    "save",
    "share_comm_ctx",
]
