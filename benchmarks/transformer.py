"""The model of transformer.h in Python: change both. Only this one can have fewer heads of keys and values."""

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.sizes = (dim,)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, self.sizes, self.weight, 1e-5)


class Block(nn.Module):
    PARAMS = 9

    def __init__(self, dim, heads, params, key_heads=None):
        super().__init__()
        self.heads = heads
        self.key_heads = key_heads or heads
        key_dim = dim // heads * self.key_heads
        self.linears = []
        self.norms = []
        if params < self.PARAMS:
            for i in range(params):
                self.linears.append(nn.Linear(dim, dim, bias=False))
                self.add_module(f"linear{i}", self.linears[-1])
            return
        self.norm1 = RmsNorm(dim)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, key_dim, bias=False)
        self.value = nn.Linear(dim, key_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.norm2 = RmsNorm(dim)
        self.gate = nn.Linear(dim, 4 * dim, bias=False)
        self.up = nn.Linear(dim, 4 * dim, bias=False)
        self.down = nn.Linear(4 * dim, dim, bias=False)
        for i in range(self.PARAMS, params):
            self.norms.append(RmsNorm(dim))
            self.add_module(f"norm{i}", self.norms[-1])

    def split(self, t, heads):
        return t.view(t.size(0), t.size(1), heads, -1).transpose(1, 2)

    def attention(self, x):
        mixed = F.scaled_dot_product_attention(
            self.split(self.query(x), self.heads),
            self.split(self.key(x), self.key_heads),
            self.split(self.value(x), self.key_heads),
            is_causal=True,
            enable_gqa=self.key_heads < self.heads,
        )
        return self.output(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        for linear in self.linears:
            x = x + F.silu(linear(x))
        if not self.linears:
            x = x + self.attention(self.norm1(x))
            h = self.norm2(x)
            x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        for norm in self.norms:
            x = norm(x)
        return x


class Transformer(nn.Module):
    def __init__(self, dim, layers, heads, vocabulary, params_per_block=Block.PARAMS, key_heads=None):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = []
        for i in range(layers):
            self.blocks.append(Block(dim, heads, params_per_block, key_heads))
            self.add_module(f"block{i}", self.blocks[-1])
        self.norm = RmsNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill_parameters(model):
    for parameter in model.parameters():
        values = torch.arange(parameter.numel(), dtype=torch.float, device=parameter.device)
        parameter.copy_(values.cos().mul(0.1).view_as(parameter))


def batch_of(size, sequence, vocabulary, number=0):
    position = torch.arange(size * sequence) + 5 * number
    return (position * 7 % vocabulary).view(size, sequence), position * 11 % vocabulary


def check_step(parameters, forward_backward):
    """Returns the loss, the gradient norm and the numbers of collectives of one step."""
    from torch.distributed.tensor.debug import CommDebugMode

    comm = CommDebugMode()
    with comm:
        loss = forward_backward().item()
    square = 0.0
    for parameter in parameters:
        grad = parameter.grad
        grad = grad.to_local() if hasattr(grad, "to_local") else grad
        square += grad.double().square().sum().item()
    counts = {str(op): n for op, n in comm.get_comm_counts().items()}
    return {
        "loss": loss,
        "grad_norm": square**0.5,
        "all_gathers": sum(n for op, n in counts.items() if "allgather" in op or "all_gather" in op),
        "reduce_scatters": sum(n for op, n in counts.items() if "reduce_scatter" in op),
    }


def loss_of(model, batch):
    tokens, targets = batch
    logits = model(tokens)
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets)
