"""Trains with Python's FSDP2 and writes down what a rank sees, for C++ to compare.

    fsdp2_golden.py FOLDER

FOLDER/MODEL.pt: initial parameters, and the inputs by step and rank.
FOLDER/MODEL.WORLD.RECIPE.RANK.pt: the recipe, and per step the loss, the local
gradients, the collectives and the order of events.
FOLDER/made: when all of this is there.
FOLDER/missing: instead of all others, if this torch has no fully_shard; says why.
FOLDER/failed: the error that ended this script. The build goes on, and the tests fail.
"""

import contextlib
import dataclasses
import pathlib
import shutil
import sys
import tempfile
import traceback
import warnings

import torch
import torch._dynamo  # noqa: F401  once, instead of in every process by FSDP
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

FOLDER = pathlib.Path(sys.argv[1])
shutil.rmtree(FOLDER, ignore_errors=True)
FOLDER.mkdir(parents=True)
try:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
except ImportError as error:
    (FOLDER / "missing").write_text(str(error))
    sys.exit(0)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

STEPS = 10
MLP_DIM = 5  # divides by none of the worlds; over 4 the last rank gets nothing


# ------------------------------------------------------------ Models (tests/support/models.h)


class MLP(nn.Module):
    def __init__(self, dim, dim_multiplier):
        super().__init__()
        self.in_proj = nn.Linear(dim, dim_multiplier * dim)
        self.out_proj = nn.Linear(dim_multiplier * dim, dim)

    def forward(self, x):
        return F.relu(self.out_proj(F.relu(self.in_proj(x))))


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, nn.Linear(dim, dim, bias=False))

    def forward(self, x):
        def heads(t):
            return t.unflatten(2, (self.n_heads, -1)).transpose(1, 2)

        q, k, v = heads(self.wq(x)), heads(self.wk(x)), heads(self.wv(x))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w1 = nn.Linear(dim, 4 * dim)
        self.w2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, n_heads)
        self.ffn_norm = nn.LayerNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, x):
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """Without dropout, with tied weights."""

    def __init__(self, n_layers, vocab=8, max_seq_len=16, dim=16, n_heads=4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.pos_embeddings = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens):
        h = self.tok_embeddings(tokens) + self.pos_embeddings(torch.arange(tokens.size(1)))
        for layer in self.layers:
            h = layer(h)
        return self.output(self.norm(h)).float()


class TransformerCase:
    seed = 0

    def model():
        return Transformer(n_layers=3)

    def groups(model):
        return [*model.layers, model]

    def parallelize(model, mesh):
        plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
        plan |= {"attention.wo": RowwiseParallel()}
        plan |= {"feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel()}
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
            layer.attention.n_heads //= mesh.size()

    def input():
        return torch.randint(0, 8, (2, 16))

    def loss(model, tokens):
        logits = model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class MLPsCase:
    """The root owns no parameter."""

    seed = 31  # with which enough of the ReLUs stay alive

    def model():
        return nn.Sequential(*(MLP(MLP_DIM, multiplier) for multiplier in (3, 4, 3)))

    def groups(model):
        return [*model, model]

    def parallelize(model, mesh):
        # Not local: the parts are uneven, which a local tensor does not say.
        plan = {"in_proj": ColwiseParallel(use_local_output=False), "out_proj": RowwiseParallel()}
        for mlp in model:
            parallelize_module(mlp, mesh, plan)

    def input():
        return torch.randn(4, MLP_DIM)

    def loss(model, x):
        return (model(x) - 1).pow(2).mean()


CASES = {"transformer": TransformerCase, "mlps": MLPsCase}


# ------------------------------------------------------------ Recipes


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained; C++ reads it from the file. Parameters are named
    by the beginning of their name."""

    models: tuple = ("transformer", "mlps")
    worlds: tuple = (2, 4)
    # Both sides do the same in the same order, to the bit: the fused optimizer,
    # and sums in the order of ranks. Else torch's default optimizer, and gloo.
    exact: bool = True
    axes: tuple = ()  # of the mesh, by name: tensor parallel over "tp", FSDP over the others
    sizes: tuple = ()
    reshard: bool | int | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None  # of the root
    float_norms: bool = False  # groups of their own, which compute in float
    microbatches: int = 1  # of which the last reduces
    ignored: tuple = ()  # gradients averaged by hand
    frozen: tuple = ()
    thawed: tuple = ()  # of these, in thaw_step
    scale: float | None = None  # of a GradScaler, which meets an inf on rank 1 in inf_step
    thaw_step: int = 2
    inf_step: int = 4

    @property
    def tp(self):
        return self.sizes[-1] if "tp" in self.axes else 1

    def policy(self, **changes):
        names = {"param_dtype": self.param_dtype, "reduce_dtype": self.reduce_dtype} | changes
        return MixedPrecisionPolicy(
            **{key: getattr(torch, name) for key, name in names.items() if name is not None}
        )

    def settings(self):
        values = dataclasses.asdict(self).items()
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values}


BF16 = Recipe(param_dtype="bfloat16", reduce_dtype="float32")
HSDP = Recipe(exact=False, worlds=(4,), axes=("replicate", "shard"), sizes=(2, 2))
RECIPES = {
    "true": Recipe(exact=False, worlds=(1, 2, 3, 4), reshard=True),
    "false": Recipe(exact=False, worlds=(1, 2, 3, 4), reshard=False),
    "2": Recipe(exact=False, reshard=2),
    "none": Recipe(exact=False, worlds=(1, 2, 3, 4)),
    "bf16": dataclasses.replace(BF16, worlds=(1, 2, 4), reshard=True),
    "bf16_kept": dataclasses.replace(BF16, reshard=False),
    "bf16_accumulated": dataclasses.replace(BF16, reshard=True, microbatches=3),
    "bf16_reduced": Recipe(param_dtype="bfloat16", microbatches=2),
    "float_reduced_in_bf16": Recipe(reduce_dtype="bfloat16", reshard=False, microbatches=2),
    "float_norms": dataclasses.replace(BF16, output_dtype="float32", float_norms=True),
    "fp16_scaled": Recipe(models=("mlps",), param_dtype="float16", scale=1024.0),
    "ignored": Recipe(models=("mlps",), ignored=("0.out_proj.bias", "1.in_proj", "2.")),
    "frozen": Recipe(models=("mlps",), frozen=("0.in_proj.weight", "1."), thawed=("1.",)),
    "bf16_frozen": dataclasses.replace(
        BF16,
        models=("transformer",),
        frozen=("pos_embeddings", "layers.0.attention.", "layers.1."),
        thawed=("layers.0.",),
    ),
    "hsdp": HSDP,
    "hsdp_accumulated": dataclasses.replace(
        HSDP, models=("mlps",), reshard=True, microbatches=3
    ),
    "tp": Recipe(exact=False, worlds=(2,), axes=("tp",), sizes=(2,)),
    "2d": Recipe(exact=False, worlds=(4,), axes=("dp", "tp"), sizes=(2, 2), reshard=True),
    "3d": Recipe(
        exact=False,
        models=("mlps",),
        worlds=(8,),
        axes=("replicate", "shard", "tp"),
        sizes=(2, 2, 2),
    ),
}


# ------------------------------------------------------------ What is recorded


@contextlib.contextmanager
def recorded_events(events):
    """Unshard, reshard and post_backward of every group, no-ops left out."""
    names = ("unshard", "reshard", "post_backward")
    originals = {name: getattr(FSDPParamGroup, name) for name in names}

    def record(what, group):
        events.append(f"{what} {group._module_fqn or ''} {group._training_state.name}")

    def unshard(self, *args, **kwargs):
        if self._all_gather_result is None and not self.is_unsharded:
            record("unshard", self)
        return originals["unshard"](self, *args, **kwargs)

    def reshard(self, *args, **kwargs):
        if self._training_state.name != "FORWARD" or self._reshard_after_forward:
            record("reshard", self)
        return originals["reshard"](self, *args, **kwargs)

    def post_backward(self, *args, **kwargs):
        originals["post_backward"](self, *args, **kwargs)
        record("post_backward", self)

    for patched in (unshard, reshard, post_backward):
        setattr(FSDPParamGroup, patched.__name__, patched)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(FSDPParamGroup, name, original)


class Collectives(TorchDispatchMode):
    """CommDebugMode without all else it does, which takes most of the time: how
    many there were of each, and the bytes of their larger buffers."""

    NAMES = {
        "_allgather_base_": ("all_gather", 0),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "allreduce_": ("all_reduce", 0),
    }

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = {}, {}

    def add(self, name, tensor):
        self.counts[name] = self.counts.get(name, 0) + 1
        self.bytes[name] = self.bytes.get(name, 0) + tensor.nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it will call us with its local tensors
        if func.namespace == "c10d":
            # One we do not know is an error.
            name, larger = self.NAMES[func.overloadpacket.__name__]
            for tensor in args[larger] if name == "all_reduce" else [args[larger]]:
                self.add(name, tensor)
        return func(*args, **(kwargs or {}))


def sum_over_ranks(tensor):
    """In float and the order of ranks."""
    everyones = torch.empty(dist.get_world_size(), *tensor.shape, dtype=tensor.dtype)
    with _disable_current_modes():
        dist.all_gather_into_tensor(everyones.view(-1), tensor.reshape(-1))
    total = everyones[0].float()
    for each in everyones[1:]:
        total += each
    return total


class RankOrderReduceScatter(ReduceScatter):
    """Rounds once, where gloo rounds every partial sum, in an order that differs
    from element to element. Of two ranks both make the same."""

    def __init__(self, recorded):
        self.recorded = recorded

    def allocate(self, size, *, dtype, device):
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.recorded().add("reduce_scatter", input_tensor)
        mine = sum_over_ranks(input_tensor).view(group.size(), -1)[group.rank()]
        output_tensor.copy_(mine / group.size() if op == dist.ReduceOp.AVG else mine)


# ------------------------------------------------------------ Training


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(case, model, recipe, mesh):
    """Returns the ignored parameters."""
    if recipe.tp > 1:
        case.parallelize(model, mesh["tp"])
        if mesh.ndim == 1:
            return []
        mesh = mesh[recipe.axes[:-1]]
    params = dict(model.named_parameters())
    ignored = [param for name, param in params.items() if name.startswith(recipe.ignored)]
    kwargs = {"mesh": mesh, "ignored_params": set(ignored)}
    if recipe.reshard is not None:
        kwargs["reshard_after_forward"] = recipe.reshard
    if recipe.float_norms:
        policy = recipe.policy(param_dtype="float32", output_dtype=recipe.param_dtype)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                fully_shard(module, mp_policy=policy, **kwargs)
    *blocks, root = case.groups(model)
    for block in blocks:
        fully_shard(block, mp_policy=recipe.policy(), **kwargs)
    fully_shard(root, mp_policy=recipe.policy(output_dtype=recipe.output_dtype), **kwargs)
    return ignored


def train(case, start, recipe, rank):
    mesh = init_device_mesh(
        "cpu",
        recipe.sizes or (dist.get_world_size(),),
        mesh_dim_names=recipe.axes or None,
    )
    model = case.model()
    model.load_state_dict(start["params"], strict=False)  # tied weights come once
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(recipe.frozen))
    ignored = shard(case, model, recipe, mesh)
    params = dict(model.named_parameters())
    others = [param for param in params.values() if not isinstance(param, DTensor)]
    sharded = [param for param in params.values() if isinstance(param, DTensor)]
    optimizer = torch.optim.AdamW(
        # One kernel call takes either DTensors or tensors.
        [{"params": group} for group in (sharded, others) if group],
        lr=1e-2,
        fused=recipe.exact,
    )
    scaler = torch.amp.GradScaler(
        "cpu", enabled=recipe.scale is not None, init_scale=recipe.scale or 1.0, growth_interval=3
    )
    losses, scales, grads = [], [], {name: [] for name in params}
    phases = ("forward", "backward")
    recorded = {what: {phase: [] for phase in phases} for what in ("events", "counts", "bytes")}
    current = None

    @contextlib.contextmanager
    def phase(name):
        nonlocal current
        events = []
        with recorded_events(events), Collectives() as current:
            yield
        recorded["events"][name].append(events)
        recorded["counts"][name].append(current.counts)
        recorded["bytes"][name].append(current.bytes)

    if recipe.exact and dist.get_world_size() > 2:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(RankOrderReduceScatter(lambda: current))

    for step in range(STEPS):
        if step == recipe.thaw_step:
            for name, param in params.items():
                if name.startswith(recipe.thawed):
                    param.requires_grad_()
        for microbatch in range(recipe.microbatches):
            is_last = microbatch == recipe.microbatches - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last or recipe.reshard is not False)
            inputs = start["inputs"][(step + microbatch) % STEPS][rank // recipe.tp]
            with phase("forward"):
                loss = case.loss(model, inputs)
            losses.append(loss.detach())
            loss = scaler.scale(loss)
            with phase("backward"):
                loss.backward()
        for param in ignored:
            param.grad = sum_over_ranks(param.grad) / dist.get_world_size()
        if recipe.scale and rank == 1 and step == recipe.inf_step:
            next(iter(params.values())).grad.to_local()[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        for name, param in params.items():
            grads[name].append(None if param.grad is None else local(param.grad).clone())
            # Else there would be nothing to compare.
            assert dist.get_world_size() > 1 or grads[name][-1].any(), f"no gradient in {name}"
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        model.zero_grad(set_to_none=step % 2 == 0)
    return {
        "recipe": recipe.settings(),
        "losses": torch.stack(losses),
        "grads": grads,
        "params": {name: local(param.detach()).clone() for name, param in params.items()},
        "scales": scales,
        **recorded,
    }


# ------------------------------------------------------------ Running it


def run_rank(rank, world, starts, folder, store):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for label, recipe in RECIPES.items():
        for name in recipe.models if world in recipe.worlds else ():
            result = train(CASES[name], starts[name], recipe, rank)
            torch.save(result, f"{folder}/{name}.{world}.{label}.{rank}.pt")
    dist.destroy_process_group()


def main(folder):
    torch.set_num_threads(1)
    worlds = sorted({world for recipe in RECIPES.values() for world in recipe.worlds})
    starts = {}
    for name, case in CASES.items():
        torch.manual_seed(case.seed)
        params = {key: param.detach() for key, param in case.model().named_parameters()}
        inputs = [[case.input() for _ in range(max(worlds))] for _ in range(STEPS)]
        starts[name] = {"params": params, "inputs": inputs}
        torch.save(starts[name], f"{folder}/{name}.pt")
    with tempfile.TemporaryDirectory() as stores:
        for world in worlds:
            # Forked: importing torch takes longer than the training.
            arguments = (world, starts, folder, f"{stores}/{world}")
            mp.start_processes(run_rank, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    try:
        main(FOLDER)
        (FOLDER / "made").touch()
    except Exception:
        (FOLDER / "failed").write_text(traceback.format_exc())
