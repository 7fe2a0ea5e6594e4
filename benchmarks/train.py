"""One rank of the Python side of `./fsdp bench train`, which starts this program.

Does what `fsdp train` does, with torch's FSDP2: the same model (cli/train/model.cpp), first
weights, text and batches (cli/train/corpus.cpp), schedule (cli/config/schedule.cpp), clipping and
AdamW (cli/train/trainer.cpp): change both.

Prints "ready". Then each input line is a number of steps: the program begins the training anew,
takes the steps, and prints one JSON object per step.
"""

import argparse
import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ranks import join

WORD = (1 << 64) - 1  # cuts sums and products to 64 bits

# ------------------------------------------------------------ Text and batches


def files_below(folder):
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith(b"."):
            continue
        if os.path.isfile(path):
            yield path
        elif os.path.isdir(path) and not os.path.islink(path):
            yield from files_below(path)


def read_text(path):
    path = os.fsencode(path or os.path.join(os.path.dirname(torch.__file__), "include"))
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return file.read()
    parts = []
    for each in files_below(path):
        with open(each, "rb") as file:
            parts.append(file.read())
    return b"".join(part for part in parts if b"\0" not in part)


def train_part(text):
    """Returns the text without every twentieth block, which is held out."""
    block = min(max(len(text) // 20, 1), 64 << 10)
    starts = range(0, len(text), block)
    kept = b"".join(text[start : start + block] for i, start in enumerate(starts, 1) if i % 20 != 0)
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8)


def mixed(x):
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def train_rows(text, config, step, first, count):
    key = mixed((mixed(config["seed"]) + step) & WORD)
    length = config["context"] + 1
    num_starts = len(text) - config["context"]
    starts = [mixed((key + first + row) & WORD) % num_starts for row in range(count)]
    return torch.stack([text[start : start + length] for start in starts]).long()


# ------------------------------------------------------------ Model


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def rotary_table(length, config):
    head_dim = config["dim"] // config["heads"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float), torch.pow(config["rotary-base"], -exponents))
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x, rotary):
    low, high = x.chunk(2, -1)
    cos, sin = rotary
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.sizes = (config["dim"],)
        self.eps = config["norm-eps"]
        self.weight = nn.Parameter(torch.ones(self.sizes))

    def forward(self, x):
        return F.rms_norm(x, self.sizes, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, heads, kv_heads = config["dim"], config["heads"], config["kv-heads"]
        self.head_dim = dim // heads
        self.enable_gqa = heads != kv_heads
        self.q_proj = linear(dim, heads * self.head_dim)
        self.k_proj = linear(dim, kv_heads * self.head_dim)
        self.v_proj = linear(dim, kv_heads * self.head_dim)
        self.o_proj = linear(heads * self.head_dim, dim)

    def heads_of(self, projection, x):
        return projection(x).view(x.size(0), x.size(1), -1, self.head_dim).transpose(1, 2)

    def forward(self, x, rotary):
        q = rotate(self.heads_of(self.q_proj, x), rotary)
        k = rotate(self.heads_of(self.k_proj, x), rotary)
        v = self.heads_of(self.v_proj, x)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.enable_gqa)
        return self.o_proj(y.transpose(1, 2).reshape(x.size(0), x.size(1), -1))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = linear(config["dim"], config["hidden"])
        self.up_proj = linear(config["dim"], config["hidden"])
        self.down_proj = linear(config["hidden"], config["dim"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)

    def forward(self, x, rotary):
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab"], config["dim"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["layers"]))
        self.norm = RMSNorm(config)
        self.lm_head = None if config["tied"] else linear(config["dim"], config["vocab"])

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        rotary = rotary_table(tokens.size(1), self.config)
        for layer in self.layers:
            x = layer(x, rotary)
        x = self.norm(x)
        return self.lm_head(x) if self.lm_head else F.linear(x, self.embed_tokens.weight)


def seed_of(seed, name):
    """Returns the seed of a parameter's own generator, as src/module/meta_init.cpp does."""
    result = 0xCBF29CE484222325
    for byte in seed.to_bytes(8, "little") + name.encode():
        result = ((result ^ byte) * 0x100000001B3) & WORD
    return result ^ (result >> 32)


@torch.no_grad()
def init_weights(model, config):
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.fill_(1)
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = 1 / math.sqrt(2 * config["layers"]) if into_residual else 1
        param.normal_(0, 0.02 * scale, generator=torch.Generator().manual_seed(seed_of(config["seed"], name)))


# ------------------------------------------------------------ Training


def learning_rate(config, step):
    highest, steps = config["lr"], config["steps"]
    warmup = config.get("warmup", max(1, steps // 10))
    if step < warmup:
        return highest * (step + 1) / warmup
    part = (step - warmup) / max(1, steps - warmup)
    least = config.get("min-lr", highest / 10)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * part)), "linear": 1 - part, "constant": 1}[config["schedule"]]
    return highest if config["schedule"] == "constant" else least + (highest - least) * left


class Trainer:
    def __init__(self, config, text):
        self.config = config
        self.text = text
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = Transformer(config)
        init_weights(self.model, config)
        options = {"mesh": dist.init_device_mesh("cpu", (self.world_size,))}
        if config["reshard-after-forward"] != "auto":
            options["reshard_after_forward"] = config["reshard-after-forward"] == "true"
        for layer in self.model.layers:
            fully_shard(layer, **options)
        fully_shard(self.model, **options)
        matrices = [param for param in self.model.parameters() if param.dim() > 1]
        vectors = [param for param in self.model.parameters() if param.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config["weight-decay"]}, {"params": vectors, "weight_decay": 0}],
            lr=config["lr"],
            betas=tuple(config["betas"]),
            fused=True,
        )

    def step(self, step):
        config = self.config
        count = config["batch"] // self.world_size
        rows = train_rows(self.text, config, step, count * self.rank, count)
        scores = self.model(rows[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(scores, rows[:, 1:].reshape(-1))
        loss.backward()
        shared = loss.detach().double()
        dist.all_reduce(shared)
        result = {"loss": shared.item() / self.world_size}
        clip = config["clip"] if config["clip"] > 0 else math.inf
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip, foreach=True)
        result["grad_norm"] = norm.full_tensor().item()
        result["lr"] = learning_rate(config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = result["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result


def check_supported(config):
    here = {"accumulate": 1, "param-dtype": "fp32", "reduce-dtype": "fp32", "offload": False}
    here["activation-checkpointing"] = False
    other = [f"--{name} {config[name]}" for name in here if config.get(name, here[name]) != here[name]]
    if config["reshard-after-forward"] not in ("auto", "true", "false"):
        other.append(f"--reshard-after-forward {config['reshard-after-forward']}")
    if config["mesh"] != f"shard={dist.get_world_size()}":
        other.append(f"--mesh {config['mesh']}")
    if other:
        sys.exit("train.py has no " + ", ".join(other))


def main():
    parser = argparse.ArgumentParser()
    for name in ["rank", "world-size", "port", "threads"]:
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="as fsdp train --json says it")
    options = parser.parse_args()
    join(options, options.threads)
    check_supported(options.config)
    text = train_part(read_text(options.config.get("data")))
    print("ready", flush=True)
    for line in sys.stdin:
        trainer = Trainer(options.config, text)
        dist.barrier()
        for step in range(int(line)):
            start = time.perf_counter()
            result = trainer.step(step)
            result["seconds"] = time.perf_counter() - start
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
