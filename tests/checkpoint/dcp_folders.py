"""Writes folders of torch.distributed.checkpoint (DCP) for C++ to read.

    dcp_folders.py SPEC FOLDER

SPEC is that of interop.py, and so is exit code 77. Each folder in FOLDER has the
tensors of SPEC, except the last ones:

plain            whole tensors of one process, and values of Python
strided, views   not row-major; parts of larger storages
no_checksums     as `set_crc32_options(False)` saves
sharded          DTensors of two ranks
sharded_strided  their local tensors are not row-major
many_files       one file for each piece
threads          three files for each rank
overwritten      over a checkpoint with more files
objects          things that only Python can read
hostile          an object that would run a command, which makes FOLDER/ran
fsdp2            a model and its optimizer; fsdp2.safetensors has the same tensors
rot13            transformed by an extension
safetensors      in another format than torch.save
without_collectives  each rank has its own metadata
"""

import codecs
import io
import json
import os
import pathlib
import pickle
import sys
import tempfile

sys.dont_write_bytecode = True
from interop import DTensor, Shard, dcp, dist, distribute_tensor, expected, init_device_mesh, mp, st, torch, warnings

try:
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint._extension import StreamTransformExtension
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.serialization import set_crc32_options
except ImportError as error:
    print(f"Python cannot take part: {error}")
    sys.exit(77)


def save(state, path, alone=True, **options):
    dcp.save(state, storage_writer=FileSystemWriter(path, **options), no_dist=alone)


def strided(value):
    """The same values, with the dims in memory in reverse order."""
    back = tuple(reversed(range(value.dim())))
    return value.permute(back).contiguous().permute(back)


def part_of_more(value):
    """The same values, in the middle of a storage."""
    data = value.reshape(-1).view(torch.uint8)
    more = torch.cat([torch.zeros(16, dtype=torch.uint8), data, data])
    return more[16 : 16 + data.numel()].view(value.dtype).reshape(value.shape)


class Rot13(StreamTransformExtension):
    """As a compression would be."""

    class Writer(io.RawIOBase):
        def __init__(self, output):
            self.output = output

        def write(self, data):
            text = codecs.encode(bytes(data).decode("latin1"), "rot13")
            self.output.write(text.encode("latin1"))
            return len(data)

    @staticmethod
    def registry_name():
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version):
        return Rot13()

    def get_descriptor(self):
        return "stream.rot13/1"

    def transform_to(self, output):
        return Rot13.Writer(output)

    def transform_from(self, input):
        raise NotImplementedError


class Command:
    """Unpickling it runs a command."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def write_alone(state, folder):
    nested = {"layers": [{"weight": state["rows"]}], "layers.1.weight": state["rows"]}  # one tensor, twice
    values = {
        "step": 7, "large": -(2**40), "rate": 0.5, "endless": float("inf"), "done": False, "name": "größer",
        "list": [1, (2.5, "x"), {"deep": [True]}], "empty": [], "none": None, "by_number": ({3: "three"},),
    }  # fmt: skip
    save({**state, "model": nested, **values}, folder / "plain")
    save({name: strided(value) for name, value in state.items()}, folder / "strided")
    save({name: part_of_more(value) for name, value in state.items()}, folder / "views")
    set_crc32_options(False)
    save(state, folder / "no_checksums")
    set_crc32_options(True)
    cycle = [1]
    cycle.append(cycle)
    doubled = (0,)
    for _ in range(60):
        doubled = (doubled, doubled)
    objects = {
        "bytes": b"\xff", "set": {1}, "huge": 2**80, "dtype": torch.float32, "size": torch.Size([1]), "complex": 1j,
        "keys": ({(1, 2): 3},), "tuple": (torch.ones(2), 5), "surrogate": "\ud800", "cycle": (cycle,), "doubled": doubled,
        "taken": [1], "taken.0": 2,
    }  # fmt: skip
    save({"w": state["rows"], **objects}, folder / "objects")
    save({"w": state["rows"], "evil": Command(folder / "ran"), "step": 3}, folder / "hostile")
    save(state, folder / "rot13", _extensions=[Rot13()])
    save(state, folder / "safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    (folder / "hostile.metadata").write_bytes(pickle.dumps(Command(folder / "ran")))


def train(folder, rank):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    for _ in range(2):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state_of(**options):
        options = StateDictOptions(flatten_optimizer_state_dict=True, **options)
        return {
            "model": get_model_state_dict(model, options=options),
            "optim": get_optimizer_state_dict(model, optimizer, options=options),
        }

    save(state_of(), folder / "fsdp2", alone=False)
    whole = state_of(full_state_dict=True, cpu_offload=True)
    if rank == 0:
        tensors = {
            f"{top}.{name}": value
            for top, state in whole.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        st.save_file(tensors, folder / "fsdp2.safetensors")


def write_rank(rank, spec, folder, rendezvous):
    """One of two ranks."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state, columns_first = {}, {}
    for name, dtype, shape, dim in spec:
        value = expected(name, dtype, shape)
        state[name] = columns_first[name] = value
        if dim is not None:  # every rank has the values: nothing has to be sent
            state[name] = value = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
            columns_first[name] = DTensor.from_local(
                strided(value.to_local()), mesh, [Shard(dim)], run_check=False, shape=value.shape, stride=value.stride()
            )
    save(state, folder / "sharded", alone=False)
    save(columns_first, folder / "sharded_strided", alone=False)
    save(state, folder / "many_files", alone=False, single_file_per_rank=False)
    save(state, folder / "threads", alone=False, thread_count=3)
    others = {name: torch.zeros(3) for name in (*state, "more")}
    save(others, folder / "overwritten", alone=False, single_file_per_rank=False)
    save(state, folder / "overwritten", alone=False)
    dcp.save(state, checkpoint_id=folder / "without_collectives", use_collectives=False)
    train(folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[1])
    folder = pathlib.Path(sys.argv[2])
    write_alone({name: expected(name, dtype, shape) for name, dtype, shape, _ in spec}, folder)
    with tempfile.TemporaryDirectory() as temporary:
        rendezvous = f"file://{temporary}/rendezvous"
        mp.start_processes(write_rank, (spec, folder, rendezvous), 2, start_method="fork")
