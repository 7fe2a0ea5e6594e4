"""Checkpoints between this library and Python's safetensors and DCP.

    interop.py read SPEC SHARDED_FOLDER HF_FOLDER
    interop.py write SPEC FOLDER

SPEC is a JSON list of [name, dtype, shape, shard_dim or null]. Byte i of a tensor
is (7 i + len(name)) % 120, of a bool % 2: no value is NaN. Exit code 77: something
that this needs is missing, and the last line says what.
"""

import json
import math
import os
import pathlib
import sys
import tempfile
import warnings

warnings.simplefilter("ignore")
try:
    import safetensors.torch as st
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing as mp
    from safetensors import safe_open
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
except ImportError as error:
    print(f"Python cannot take part: {error}")
    sys.exit(77)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def expected(name, dtype, shape):
    count = math.prod(shape) * DTYPES[dtype].itemsize
    data = (7 * torch.arange(count) + len(name)) % (2 if dtype == "BOOL" else 120)
    return data.to(torch.uint8).view(DTYPES[dtype]).reshape(shape)


def same(found, wanted, where):
    assert found.dtype == wanted.dtype, f"{where}: {found.dtype}, not {wanted.dtype}"
    assert found.shape == wanted.shape, f"{where}: {found.shape}, not {wanted.shape}"
    both = [x.contiguous().reshape(-1).view(torch.uint8) for x in (found, wanted)]
    assert torch.equal(*both), f"{where}: other values"


def check_state(found, wanted, where):
    assert set(found) == set(wanted), f"{where}: {sorted(set(found) ^ set(wanted))}"
    for name, value in wanted.items():
        same(found[name], value, f"{where}, {name}")


# --- Reading what C++ wrote --------------------------------------------------


def files_in(folder):
    return sorted(pathlib.Path(folder).glob("*.safetensors"))


def assembled(folder, wanted):
    """Each rank's file by itself, as the docs tell it."""
    whole = {name: torch.empty_like(value) for name, value in wanted.items()}
    for path in files_in(folder):
        with safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                piece = file.get_tensor(name)
                begin = info[name]["saved_offsets"]
                place = tuple(slice(b, b + n) for b, n in zip(begin, piece.shape))
                whole[name][place].copy_(piece) if piece.dim() else whole[name].copy_(piece)
    return whole


def by_dcp(folder, wanted):
    state = {name: torch.empty_like(value) for name, value in wanted.items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


def by_load_file(folder):
    state = {}
    for path in files_in(folder):
        part = st.load_file(path)
        assert not set(state) & set(part), f"{path}: a name that another file has"
        state.update(part)
    return state


def read(wanted, sharded, hf):
    assert len(files_in(sharded)) > 1, f"{sharded} is not sharded"
    check_state(assembled(sharded, wanted), wanted, "sharded, by safe_open")
    check_state(by_dcp(sharded, wanted), wanted, "sharded, by dcp.load")
    check_state(by_load_file(hf), wanted, "Hugging Face, by load_file")
    check_state(by_dcp(hf, wanted), wanted, "Hugging Face, by dcp.load")
    index = json.loads((pathlib.Path(hf) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    for name, file in index["weight_map"].items():
        with safe_open(pathlib.Path(hf) / file, "pt") as opened:
            assert name in opened.keys(), f"{name} is not in {file}"


# --- Writing for C++ ---------------------------------------------------------


def write_rank(rank, spec, folder, rendezvous):
    """One of two ranks that save DTensors."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for name, dtype, shape, dim in spec:
        value = expected(name, dtype, shape)
        if dim is not None:  # every rank has the values: nothing has to be sent
            value = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
            assert isinstance(value, DTensor)
        state[name] = value
    dcp.save(
        state, storage_writer=HuggingFaceStorageWriter(f"{folder}/dcp", save_distributed=True)
    )
    mapping = {item[0]: 1 + i % 2 for i, item in enumerate(spec)}
    dcp.save(
        state,
        storage_writer=HuggingFaceStorageWriter(
            f"{folder}/dcp_many", fqn_to_index_mapping=mapping, save_distributed=True
        ),
    )
    # torch 2.13 cannot consolidate integers and bools, and writes wrong
    # values for tensors without dims.
    floats = {n: v for n, v in state.items() if v.dtype.is_floating_point and v.dim()}
    dcp.save(
        floats,
        storage_writer=HuggingFaceStorageWriter(
            f"{folder}/consolidated", save_distributed=True, enable_consolidation=True
        ),
    )
    dist.destroy_process_group()


def write(spec, state, folder):
    folder = pathlib.Path(folder)
    st.save_file(state, folder / "single.safetensors", metadata={"format": "pt"})
    (folder / "hf").mkdir()
    names = list(state)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{i:05}-of-00002.safetensors"
        st.save_file({name: state[name] for name in part}, folder / "hf" / file)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    writer = HuggingFaceStorageWriter(
        str(folder / "rank0"), fqn_to_index_mapping={n: 1 + len(n) % 2 for n in names}
    )
    dcp.save(state, storage_writer=writer, no_dist=True)
    with tempfile.TemporaryDirectory() as temporary:
        rendezvous = f"file://{temporary}/rendezvous"
        mp.start_processes(write_rank, (spec, str(folder), rendezvous), 2, start_method="fork")


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    spec = json.loads(sys.argv[2])
    state = {name: expected(name, dtype, shape) for name, dtype, shape, _ in spec}
    if sys.argv[1] == "read":
        read(state, sys.argv[3], sys.argv[4])
    else:
        write(spec, state, sys.argv[3])
