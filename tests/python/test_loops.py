"""Training loops as torchtitan and torchtune have them, with both engines."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity import ENGINES, Mlp, batch, compare, mesh_of, see_grads, whole
from pool import DEVICE
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor

import fsdp_cpp


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Mlp() for i in range(3)})
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, 6, bias=False)

    def init_weights(self):
        self.norm.reset_parameters()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.3)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


# ---- torchtitan: meta device, recomputed blocks, bf16, a schedule, checkpoints by DCP


def titan_model(engine):
    with torch.device("meta"):
        model = Decoder()
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False)
    policy = fsdp_cpp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh_of(), "mp_policy": policy}
    for layer in model.layers.values():
        engine.fully_shard(layer, **options)
    engine.fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    engine.fully_shard(model, **options)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights()
    return model


class TitanTrainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))

    def step(self, number, seen):
        loss = self.model(batch(number)).float().square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
        seen.append(("norm", whole(norm)))
        see_grads(self.model, seen, loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def state(self):
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
        }

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def resume(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])


def titan(folder):
    def run(engine, model, seen):
        trainer, resumed = TitanTrainer(model), TitanTrainer(titan_model(engine))
        for number in range(2):
            trainer.step(number, seen)
        place = f"{folder}/{'torch' if engine is ENGINES['torch'] else 'fsdp_cpp'}"
        trainer.save(place)
        resumed.resume(place)
        for each in (trainer, resumed):
            steps: list = []
            for number in range(2, 4):
                each.step(number, steps)
            seen += steps
        half = len(steps)
        for (name, expected), (_, value) in zip(seen[-2 * half : -half], seen[-half:]):
            assert torch.equal(expected, value), name

    compare(titan_model, run, collectives=False)  # DCP and the norm have their own


def test_the_loop_of_torchtitan(ranks, tmp_path):
    ranks(2).run(titan, str(tmp_path))


# ---- torchtune: weights that rank 0 read, parameters on the host, optimizer steps in backward


def tune_model(engine):
    full = Decoder()
    with torch.device("meta"):
        model = Decoder()
    options = {"mesh": mesh_of(), "offload_policy": fsdp_cpp.CPUOffloadPolicy(pin_memory=DEVICE != "cpu")}
    for layer in model.layers.values():
        engine.fully_shard(layer, **options)
    engine.fully_shard(model, **options)
    placed = {}
    for name, param in model.state_dict().items():
        value = full.state_dict()[name].to(DEVICE)
        placed[name] = nn.Parameter(distribute_tensor(value, param.device_mesh, param.placements).cpu())
    model.load_state_dict(placed, strict=True, assign=True)
    return model


def tune():
    def run(engine, model, seen):
        optimizers = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

        def step_now(param):
            assert param.device.type == "cpu"
            seen.append(("grad", param.grad.to_local().clone()))
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step_now)
        for number in range(3):
            loss = model(batch(number)).square().mean()
            loss.backward()
            seen.append(("loss", loss.detach().clone()))
            assert all(param.grad is None for param in model.parameters())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # on rank 0; the others get nothing
        seen += [(name, value.clone()) for name, value in state.items()]
        seen.append(("names", list(state)))

    # The parameters are on the host, so what compares the models at the end gathers them over gloo.
    compare(tune_model, run, collectives=False)


def test_the_loop_of_torchtune(ranks):
    ranks(2).run(tune)
