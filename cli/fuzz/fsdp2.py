"""Runs cases of `fsdp fuzz engine` with Python's FSDP2.

    fsdp2.py CASES RESULTS SECONDS

CASES: a JSON list. RESULTS: one line of JSON per case, with its seed and either the final
parameters or an error. Ends after SECONDS. Exits with 3 if there is no FSDP2. The model is that of model.cpp.
"""

import datetime
import json
import os
import sys
import time

try:
    import torch
    import torch._dynamo  # noqa: F401  once, instead of in every process by FSDP
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn import functional as F
    from torch.utils.checkpoint import checkpoint
except ImportError:
    sys.exit(3)

RANKS = 2
DTYPES = {"double": torch.double, "float": torch.float, "bfloat16": torch.bfloat16, None: None}


def values(sizes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.double).to(dtype)


class Node(nn.Module):
    def __init__(self, case, block, state):
        super().__init__()
        self.block, self.state, self.kind = block, state, block["kind"]
        dim, size = case["dim"], block["size"]
        shapes = {
            "linear": {"weight": (dim, dim)},
            "mlp": {"up": (size, dim), "down": (dim, size)},
            "norm": {"weight": (dim,)},
            "table": {"table": (size, dim)},
            "scale": {"scale": (size,)},
        }.get(self.kind, {})
        if block["bias"] and self.kind not in ("table", "scale"):
            shapes["bias"] = (dim,)
        self.bias = None
        for name, shape in shapes.items():
            value = values(shape, DTYPES[case["dtype"]], case["parameter_seed"] + state["params"])
            state["params"] += 1
            setattr(self, name, nn.Parameter(value * 0.5, requires_grad=not block["frozen"]))
        self.nodes = []
        for i, inner in enumerate(block["blocks"]):
            node = Node(case, inner, state)
            if inner["tied"] >= 0:
                node.weight = self.nodes[inner["tied"]].weight
            self.add_module(f"b{i}", node)
            self.nodes.append(node)

    def call(self, node, x):
        if node.block["skip"] == "odd_steps" and self.state["step"] % 2 == 1:
            return None
        if node.block["checkpointed"]:
            return checkpoint(node, x, use_reentrant=False)
        return node(x)

    def forward(self, x):
        if self.kind in ("chain", "branches"):
            y = x
            for _ in range(self.block["size"] if self.kind == "chain" else 1):
                for node in self.nodes:
                    z = self.call(node, y if self.kind == "chain" else x)
                    if z is not None:
                        y = z if self.kind == "chain" else y + z
            return y if self.bias is None else torch.tanh(y) + self.bias
        x = x.to(next(p for p in self.parameters(recurse=False)).dtype)
        if self.kind == "linear":
            return torch.tanh(F.linear(x, self.weight, self.bias))
        if self.kind == "mlp":
            return x + F.linear(torch.tanh(F.linear(x, self.up)), self.down, self.bias)
        if self.kind == "norm":
            return F.layer_norm(x, (x.size(-1),), self.weight, self.bias, 0.1)
        if self.kind == "table":
            return x + F.embedding(torch.arange(x.size(0)) % self.block["size"], self.table)
        return x * (self.scale.mean() + 1)


def shard(case, net):
    groups = [[] for _ in case["groups"]]
    order = []

    def visit(node):
        for inner in node.nodes:
            visit(inner)
        for inner in node.nodes:
            if inner.block["group"] != node.block["group"]:
                if not groups[inner.block["group"]]:
                    order.append(inner.block["group"])
                groups[inner.block["group"]].append(inner)

    visit(net)
    groups[0] = [net]
    for index in [*order, 0]:
        group, modules = case["groups"][index], groups[index]
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[group["param_dtype"]],
            reduce_dtype=DTYPES[group["reduce_dtype"]],
            output_dtype=DTYPES[group["output_dtype"]],
            cast_forward_inputs=group["cast_inputs"],
        )
        options = {"mp_policy": policy}
        if group["reshard"] >= 0:
            options["reshard_after_forward"] = {0: False, 1: True}.get(
                group["reshard"], group["reshard"]
            )
        fully_shard(modules if len(modules) > 1 else modules[0], **options)
    for index, group in enumerate(case["groups"]):
        for when in ("forward", "backward"):
            if group[f"{when}_prefetch"]:
                others = [groups[other][0] for other in group[f"{when}_prefetch"]]
                getattr(groups[index][0], f"set_modules_to_{when}_prefetch")(others)
    return [modules[0] for modules in groups]


def happen(event, net, groups, evaluate):
    group = groups[event["target"]]
    if event["action"] == "evaluate":
        with torch.no_grad():
            evaluate()
    elif event["action"] == "unshard_reshard":
        group.unshard()
        group.reshard()
    elif event["action"] == "edit_shards":
        with torch.no_grad():
            for param in net.parameters():
                param.to_local().mul_(0.5)
    elif event["action"] == "set_reshard":
        group.set_reshard_after_forward(event["value"], recurse=False)


def train(case, rank):
    state = {"params": 0, "step": 0}
    net = Node(case, case["root"], state)
    groups = shard(case, net)
    params = list(net.parameters())
    if case["optimizer"] == "sgd":
        optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.01)
    elif case["optimizer"] == "adam":
        optimizer = torch.optim.Adam(params, lr=0.01, eps=1e-2)
    else:
        optimizer = torch.optim.AdamW(params, lr=0.01, eps=1e-2, weight_decay=0.01)
    dtype = DTYPES[case["dtype"]]
    for index, step in enumerate(case["steps"]):
        state["step"] = index

        def loss_of(microbatch, call):
            seed = case["batch_seed"] + 1000 * index + 100 * microbatch + 10 * call + rank
            x = values((step["rows"], case["dim"]), dtype, seed)
            x.requires_grad_(step["input_grad"] and torch.is_grad_enabled())
            return net(x).to(dtype).pow(2).add(1).sqrt().mean()

        for microbatch in range(step["microbatches"]):
            for event in step["events"]:
                if event["microbatch"] == microbatch:
                    happen(event, net, groups, lambda: loss_of(microbatch, 2))
            last = microbatch == step["microbatches"] - 1
            net.set_requires_gradient_sync(last or not step["sync_last"])
            net.set_reshard_after_backward(last or not step["keep"])
            net.set_is_last_backward(last or not step["mark_last"])
            loss = loss_of(microbatch, 0)
            if step["two"]:
                loss = loss + loss_of(microbatch, 1)
            if loss.requires_grad:
                loss.backward()
        if step["clip"] and any(param.grad is not None for param in params):
            torch.nn.utils.clip_grad_norm_(params, 0.05)
        if step["update"]:
            optimizer.step()
        if step["zero"] != "never":
            optimizer.zero_grad(set_to_none=step["zero"] == "to_none")
    return {name: p.detach().full_tensor().tolist() for name, p in net.named_parameters()}


def run(rank, cases, results, deadline):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    with open(results if rank == 0 else os.devnull, "w") as file:
        for case in cases:
            going_on = torch.tensor(time.time() < deadline)
            dist.broadcast(going_on, 0)
            if not going_on:
                break
            try:
                result = {"parameters": train(case, rank)}
            except Exception as error:
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"seed": case["seed"], **result}), file=file, flush=True)


def main():
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    deadline = time.time() + float(sys.argv[3])
    os.environ.update(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(RANKS))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_PORT=str(store.port), TORCHELASTIC_USE_AGENT_STORE="True")

    mp.start_processes(
        with_rank, (cases, sys.argv[2], deadline), nprocs=RANKS, start_method="fork"
    )


def with_rank(rank, *arguments):
    os.environ["RANK"] = str(rank)
    run(rank, *arguments)


if __name__ == "__main__":
    main()
