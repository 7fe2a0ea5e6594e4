"""fsdp_cpp.save and load: what comes back is what was there, on any number of ranks."""

import functools
import os
import subprocess
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import ENGINES, batch, mesh_of, sharded_mlps, whole
from pool import DEVICE
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_flatten, tree_map_only

import fsdp_cpp

TOOL = os.environ.get("FSDP_TOOL")


def trained(engine, seed=0, steps=2, **options):
    torch.manual_seed(seed)
    model = sharded_mlps(engine, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer, **own):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        **own,
    }


def set_state(model, optimizer, state):
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def wholes(tree):
    return tree_map_only(torch.Tensor, whole, tree)


def check_equal(actual, expected):
    (actual, structure), (expected, other) = tree_flatten(wholes(actual)), tree_flatten(wholes(expected))
    assert structure == other
    for i, (value, wanted) in enumerate(zip(actual, expected)):
        assert type(value) is type(wanted), i
        assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, i


def save_all(folder):
    """What ranks save now, others load: the same state on every rank, in whole tensors."""
    model, optimizer = trained(fsdp_cpp)
    own = {"step": 7, "rate": 0.5, "name": "run", "done": False, "nothing": None, "list": [1, (2.5, "x")]}
    state = state_of(model, optimizer, **own)
    fsdp_cpp.save(state, f"{folder}/ours")
    fsdp_cpp.async_save(state, f"{folder}/later").result()
    expected = wholes(state)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")


def load_all(folder, which, shape, engine_name):
    expected = torch.load(f"{folder}/expected.pt", map_location=DEVICE)
    model, optimizer = trained(ENGINES[engine_name], seed=1, steps=1, mesh=mesh_of(*shape))
    state = state_of(model, optimizer, step=0, rate=0.0, name="", done=True, nothing=None, list=[0, (0.0, "")])
    fsdp_cpp.load(state, f"{folder}/{which}")
    check_equal(state, expected)
    set_state(model, optimizer, state)
    check_equal(state_of(model, optimizer), {name: expected[name] for name in ("model", "optimizer")})


def test_save_and_load(ranks, tmp_path):
    ranks(2).run(save_all, str(tmp_path))
    ranks(2).run(load_all, str(tmp_path), "later", (2,), "fsdp_cpp")
    for which, shape, engine in [("ours", (4,), "fsdp_cpp"), ("ours", (2, 2), "fsdp_cpp"), ("ours", (4,), "torch")]:
        ranks(4).run(load_all, str(tmp_path), which, shape, engine)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def load_into_a_model(folder):
    """The parameters of a state dict are the model's, so that a load is a new value for the next forward."""
    torch.manual_seed(0)
    model = sharded_mlps(fsdp_cpp)
    expected = model(batch(0))
    fsdp_cpp.save(model.state_dict(), folder)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert not torch.equal(model(batch(0)), expected)
    fsdp_cpp.load(model.state_dict(), folder)
    assert torch.equal(model(batch(0)), expected)


def test_load_into_a_live_model(ranks, tmp_path):
    ranks(2).run(load_into_a_model, str(tmp_path / "x"))


def there_and_back(folder):
    """What FSDP2 wrote by DCP goes on in this engine, and comes back."""
    theirs, their_optimizer = trained(ENGINES["torch"])
    dcp.save(state_of(theirs, their_optimizer), checkpoint_id=f"{folder}/dcp")
    ours, our_optimizer = trained(fsdp_cpp, seed=1)
    state = state_of(ours, our_optimizer)
    fsdp_cpp.load(state, f"{folder}/dcp")
    set_state(ours, our_optimizer, state)
    fsdp_cpp.save(state_of(ours, our_optimizer), f"{folder}/ours")
    again, again_optimizer = trained(ENGINES["torch"], seed=2)
    state = state_of(again, again_optimizer)
    fsdp_cpp.load(state, f"{folder}/ours")
    check_equal(state, state_of(theirs, their_optimizer))


def test_from_dcp_and_back(ranks, tmp_path):
    ranks(2).run(there_and_back, str(tmp_path))


def save_by_dcp(folder):
    own = {"step": 7, "rate": 0.5, "name": "run", "done": False, "nothing": None, "list": [1, (2.5, "x")]}
    state = state_of(*trained(ENGINES["torch"]), **own)
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = trained(ENGINES["torch"])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=flat)}, checkpoint_id=f"{folder}/flat")
    expected = wholes(state)
    if dist.get_rank() == 0:
        torch.save(expected, f"{folder}/expected.pt")


def load_flat(folder):
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = trained(fsdp_cpp, seed=1, steps=1)
    state = get_optimizer_state_dict(model, optimizer, options=flat)
    fsdp_cpp.load({"optimizer": state}, f"{folder}/flat")
    set_optimizer_state_dict(model, optimizer, state, options=flat)
    expected = torch.load(f"{folder}/expected.pt", map_location=DEVICE)
    check_equal(get_optimizer_state_dict(model, optimizer), expected["optimizer"])


def test_a_folder_of_dcp(ranks, tmp_path):
    ranks(2).run(save_by_dcp, str(tmp_path))
    ranks(2).run(load_all, str(tmp_path), "dcp", (2,), "fsdp_cpp")
    for shape, engine in [((4,), "fsdp_cpp"), ((2, 2), "fsdp_cpp"), ((4,), "torch")]:
        ranks(4).run(load_all, str(tmp_path), "dcp", shape, engine)
    ranks(4).run(load_flat, str(tmp_path))
    if TOOL is not None:
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        assert "good" in run([TOOL, "verify", tmp_path / "dcp"]).stdout
        converted = run([TOOL, "convert", tmp_path / "dcp", tmp_path / "converted", "--format", "sharded"])
        assert "left out" not in converted.stderr
        assert "good" in run([TOOL, "verify", tmp_path / "converted"]).stdout
        ranks(2).run(load_all, str(tmp_path), "converted", (2,), "fsdp_cpp")


def objects_of_dcp(folder):
    dcp.save({"set": {1}, "step": 3}, checkpoint_id=folder)
    state = {"step": 0}
    fsdp_cpp.load(state, folder)
    assert state == {"step": 3}
    with pytest.raises(RuntimeError, match="the object 'set' of type set, which only Python can read"):
        fsdp_cpp.load({"set": 0}, folder)


def test_objects_of_dcp(ranks, tmp_path):
    ranks(2).run(objects_of_dcp, str(tmp_path / "x"))


@functools.cache  # DTensors keep the first of two equal meshes
def mesh_2d():
    return dist.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))


def two_ways(engine, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6)).to(DEVICE)
    parallelize_module(model, mesh_2d()["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return engine.fully_shard(model, mesh=mesh_2d()["dp"])


def tensor_parallel(folder):
    model, other = two_ways(fsdp_cpp, 0), two_ways(fsdp_cpp, 1)
    fsdp_cpp.save(model.state_dict(), folder)
    fsdp_cpp.load(other.state_dict(), folder)
    check_equal(dict(other.state_dict()), dict(model.state_dict()))
    replicated = {name: distribute_tensor(torch.zeros(value.shape), mesh_2d(), [Replicate(), Replicate()])
                  for name, value in model.state_dict().items()}
    fsdp_cpp.load(replicated, folder)
    check_equal(replicated, dict(model.state_dict()))


def test_tensor_parallel(ranks, tmp_path):
    ranks(4).run(tensor_parallel, str(tmp_path / "x"))


def tensor_parallel_by_dcp(folder):
    model, other = two_ways(ENGINES["torch"], 0), two_ways(fsdp_cpp, 1)
    dcp.save(model.state_dict(), checkpoint_id=folder)
    fsdp_cpp.load(other.state_dict(), folder)
    check_equal(dict(other.state_dict()), dict(model.state_dict()))
    plain = {name: torch.zeros(value.shape, device=DEVICE) for name, value in model.state_dict().items()}
    fsdp_cpp.load(plain, folder)
    check_equal(plain, dict(model.state_dict()))


def test_tensor_parallel_by_dcp(ranks, tmp_path):
    ranks(4).run(tensor_parallel_by_dcp, str(tmp_path / "x"))


def refused(folder):
    model = sharded_mlps(fsdp_cpp)
    state = model.state_dict()
    fsdp_cpp.save({"model": state}, f"{folder}/good")
    before = wholes(dict(state))
    mesh = mesh_of()
    sums = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    for tree, kind, text in [
        ({"a": {"b": object()}}, TypeError, "'a.b' has type object"),
        ({"a": TwoTensor(torch.ones(2), torch.ones(2))}, TypeError, "'a' is a TwoTensor"),
        ({"a": torch.ones(2).to_sparse()}, TypeError, "'a' is a Tensor of layout torch.sparse_coo"),
        ({"a": 2**80}, ValueError, "more than 64 bits"),
        ({"a.b": 1, "a": {"b": 2}}, ValueError, "two values have the key 'a.b'"),
        ({"sum": sums}, ValueError, "'sum' is a sum that is not complete"),
    ]:
        with pytest.raises(kind, match=text):
            fsdp_cpp.save(tree, f"{folder}/bad")
        assert not os.path.exists(f"{folder}/bad")
    mine = object() if dist.get_rank() == 1 else 1  # the other rank must not wait for this one
    for function in (fsdp_cpp.save, fsdp_cpp.load):
        with pytest.raises((TypeError, RuntimeError), match="'a' has type object"):
            function({"a": mine}, f"{folder}/bad")
        with pytest.raises(ValueError, match="different paths: rank 0 has .*0, rank 1 has .*1"):
            function({"a": 1}, f"{folder}/{dist.get_rank()}")
    with pytest.raises(RuntimeError, match="overwrite"):
        fsdp_cpp.save({"model": state}, f"{folder}/good", overwrite=False)
    with pytest.raises(RuntimeError, match="model.more"):
        fsdp_cpp.load({"model": {**state, "more": torch.zeros(2)}}, f"{folder}/good")
    fsdp_cpp.load({"model": {**state, "more": torch.zeros(2)}}, f"{folder}/good", strict=False)
    with pytest.raises(RuntimeError, match="nowhere"):
        fsdp_cpp.load({"model": state}, f"{folder}/nowhere")
    dist.barrier()
    if dist.get_rank() == 0:
        files = [name for name in os.listdir(f"{folder}/good") if name.endswith(".safetensors")]
        with open(f"{folder}/good/{files[0]}", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
    dist.barrier()
    with pytest.raises(RuntimeError, match="checksum"):
        fsdp_cpp.load({"model": state}, f"{folder}/good")
    check_equal(dict(state), before)


def test_refused(ranks, tmp_path):
    ranks(2).run(refused, str(tmp_path))


def test_one_process_without_a_group(tmp_path):
    tree = {"weights": [torch.arange(6.0), torch.ones(2)], "step": 3}
    fsdp_cpp.save(tree, tmp_path / "x")
    loaded = {"weights": [torch.zeros(6), torch.zeros(2)], "step": 0}
    fsdp_cpp.load(loaded, tmp_path / "x")
    check_equal(loaded, tree)


@pytest.mark.skipif(TOOL is None, reason="FSDP_TOOL does not name the command line tool")
def test_the_tool_reads_it(ranks, tmp_path):
    ranks(2).run(save_all, str(tmp_path))
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
    assert "model.0.up.weight" in run([TOOL, "inspect", tmp_path / "ours"]).stdout
    assert "good" in run([TOOL, "verify", tmp_path / "ours"]).stdout
    run([TOOL, "convert", tmp_path / "ours", tmp_path / "whole"])
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    for name, expected in torch.load(tmp_path / "expected.pt", map_location="cpu")["model"].items():
        assert torch.equal(weights[f"model.{name}"], expected), name


def dcp_between_engines(how):
    torch.manual_seed(0)
    model = sharded_mlps(fsdp_cpp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(batch(0)).sum().backward()
    optimizer.step()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    expected = {name: whole(value) for name, value in state["model"].items()}
    if how == "async":
        dcp.async_save(state, checkpoint_id=folder[0]).result()
    else:
        dcp.save(state, checkpoint_id=folder[0])
    # What fsdp_cpp has saved, torch's engine loads, and the other way round.
    torch.manual_seed(1)
    for engine in ENGINES.values():
        other = sharded_mlps(engine)
        other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
        loaded = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, other_optimizer)}
        dcp.load(loaded, checkpoint_id=folder[0])
        set_model_state_dict(other, loaded["model"])
        set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])
        for name, value in other.state_dict().items():
            assert torch.equal(whole(value), expected[name]), name
        assert torch.equal(other(batch(1)), model(batch(1)))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(other, {name: value + 1 for name, value in full.items()}, options=StateDictOptions(full_state_dict=True))
    for name, value in other.state_dict().items():
        assert torch.equal(whole(value), expected[name] + 1), name


@pytest.mark.parametrize("how", ["sync", "async"])
def test_dcp_between_engines(ranks, how):
    ranks(2).run(dcp_between_engines, how)
