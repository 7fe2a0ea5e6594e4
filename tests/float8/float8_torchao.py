"""Writes what torchao's float8 linear layer computes to FOLDER/tensorwise.safetensors and rowwise.safetensors."""

import dataclasses
import sys

import torch
from safetensors.torch import save_file
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

folder = sys.argv[1]
for recipe in ("tensorwise", "rowwise"):
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=True)
    product = ScaledMMConfig(emulate=True, use_fast_accum=False, fp8_output=True, pad_inner_dim=False)
    x = torch.randn(24, 48, requires_grad=True)
    weight = torch.randn(80, 48, requires_grad=True)
    grad = torch.randn(24, 80)
    result = matmul_with_hp_or_float8_args.apply(x, weight.t(), LinearMMConfig(product, product, product), config)
    result.backward(grad)
    tensors = {
        "x": x,
        "weight": weight,
        "grad": grad,
        "result": result,
        "grad_x": x.grad,
        "grad_weight": weight.grad,
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, f"{folder}/{recipe}.safetensors")
