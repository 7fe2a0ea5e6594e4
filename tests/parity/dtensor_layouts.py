"""Prints, as lines of numbers, what Python's DTensor puts where.

One line per (mesh shape, sizes, placements, coordinate): local sizes and offsets.
"""

import itertools
import sys

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard


def encode(placement):
    if isinstance(placement, _StridedShard):
        return [2, placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return [1, placement.dim, 1]
    return [0, 0, 1]


def main():
    choices = [Replicate(), Shard(0), Shard(1)]
    cases = []
    for mesh in [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]:
        for sizes in [(0, 4), (1, 1), (4, 4), (5, 7), (8, 6), (13, 2)]:
            for placements in itertools.product(choices, repeat=len(mesh)):
                cases.append((mesh, sizes, placements))
    # Strided shards over tensor parallelism. Python processes them from left to
    # right, which is the order of FSDP over TP only where everything divides.
    for mesh in [(2, 2), (2, 4), (3, 2), (2, 3)]:
        for sizes in [(12, 12), (24, 36), (48, 12)]:
            for dim in (0, 1):
                cases.append((mesh, sizes, (_StridedShard(dim, split_factor=mesh[1]), Shard(dim))))
    for sf in (2, 3):  # alone
        for size in (6, 7, 12, 13, 24):
            cases.append(((2,), (size, 3), (_StridedShard(0, split_factor=sf),)))
    for mesh, sizes, placements in cases:
        for coordinate in itertools.product(*(range(n) for n in mesh)):
            shape, offset = _compute_local_shape_and_global_offset(
                sizes, mesh, list(coordinate), placements
            )
            flat = [n for p in placements for n in encode(p)]
            row = [len(mesh), *mesh, len(sizes), *sizes, *flat, *coordinate, *shape, *offset]
            print(*(int(n) for n in row))


if __name__ == "__main__":
    sys.exit(main())
