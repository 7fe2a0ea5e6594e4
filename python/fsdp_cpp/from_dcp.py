"""Converts a checkpoint of torch.distributed.checkpoint into one of fsdp_cpp.

    python -m fsdp_cpp.from_dcp run/dcp run/converted

Then `fsdp inspect`, `fsdp verify` and `fsdp convert` read it, and fsdp_cpp.load. It runs in one process, whose memory
must hold all of the checkpoint. DCP unpickles values that are not tensors, so the checkpoint has to be from a source
that you trust.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ._checkpoint import Path, save


def from_dcp(source: Path, target: Path, *, overwrite: bool = False) -> None:
    """Writes what torch.distributed.checkpoint has saved in the folder `source` into the folder `target`."""
    if dist.is_initialized():
        raise RuntimeError("from_dcp converts in one process: call it before init_process_group")
    if os.path.exists(target) and not overwrite:
        raise FileExistsError(f"{os.fspath(target)} is there already: choose another name, or overwrite it")
    metadata = dcp.FileSystemReader(source).read_metadata()
    state: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=source, no_dist=True)
    save(state, target, overwrite=overwrite)


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_cpp.from_dcp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="the folder of torch.distributed.checkpoint")
    parser.add_argument("target", help="the folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the target")
    from_dcp(**vars(parser.parse_args()))


if __name__ == "__main__":
    _main()
