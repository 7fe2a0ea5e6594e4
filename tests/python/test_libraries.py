"""Libraries that know nothing of fsdp_cpp: after patch_torch their FSDP2 is this engine, with the same results."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from parity import ENGINES, whole
from pool import DEVICE

import fsdp_cpp

# Not pytest.importorskip: a file of which all is skipped is an error to ctest.
LIBRARIES = ("accelerate", "peft", "transformers")
needs_libraries = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in LIBRARIES), reason=f"needs {', '.join(LIBRARIES)}"
)


def small_model(kind):
    import transformers

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    torch.manual_seed(0)
    if kind == "qwen":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def with_lora(model):
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def tokens(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 64, (2, 12), generator=generator).to(DEVICE)


def fsdp2_of(accelerator, layer):
    """Makes an Accelerator use FSDP2. On the CPU accelerate offers it only to those who insist."""
    import accelerate

    accelerator.state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=[layer]
    )
    assert accelerator.is_fsdp2


def forget_accelerate():
    """Tells accelerate, which remembers its first Accelerator, that this process is a rank and begins anew."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1")


def train_by_accelerate(kind, _folder):
    """The losses of a few steps, and the model."""
    import accelerate

    accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu", mixed_precision="bf16" if kind == "bf16 llama" else None)
    fsdp2_of(accelerator, "Qwen3DecoderLayer" if kind == "qwen" else "LlamaDecoderLayer")
    model = small_model(kind)
    if kind == "lora":
        model = with_lora(model)
    if kind == "recomputed llama":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainable = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trainable, lr=1e-2))
    losses = []
    for step in range(3):
        loss = model(input_ids=tokens(step), labels=tokens(step)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def train_by_trainer(kind, folder):
    """The losses and norms that transformers' Trainer logs, and the model. It saves checkpoints, too."""
    import transformers

    samples = [{"input_ids": tokens(i)[0].cpu(), "labels": tokens(i)[0].cpu()} for i in range(16)]
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=DEVICE == "cpu",
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        disable_tqdm=True,
        report_to=[],
    )
    trainer = transformers.Trainer(model=small_model(kind), args=arguments, train_dataset=samples)
    fsdp2_of(trainer.accelerator, "LlamaDecoderLayer")
    trainer.is_fsdp_enabled = True
    trainer.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
    return logged, trainer.model_wrapped


def with_both_engines(train, kind, folder):
    results = {}
    for which in ENGINES:
        forget_accelerate()
        undo = fsdp_cpp.patch_torch() if which == "fsdp_cpp" else None
        try:
            losses, model = train(kind, f"{folder}/{which}")
        finally:
            if undo:
                undo()
        assert isinstance(model, torch.distributed.fsdp.FSDPModule)
        assert isinstance(model, fsdp_cpp.FSDPModule) == (which == "fsdp_cpp")
        results[which] = losses, {name: whole(value) for name, value in model.state_dict().items()}
    (losses, values), (own_losses, own_values) = results.values()
    assert losses == own_losses
    assert losses[0] != losses[-1]
    assert values.keys() == own_values.keys()
    for name, value in values.items():
        assert torch.equal(value, own_values[name]), name


@needs_libraries
@pytest.mark.parametrize("kind", ["llama", "bf16 llama", "recomputed llama", "qwen", "lora"])
def test_accelerate(ranks, kind, tmp_path):
    ranks(2).run(with_both_engines, train_by_accelerate, kind, str(tmp_path))


@needs_libraries
def test_trainer_of_transformers(ranks, tmp_path):
    ranks(2).run(with_both_engines, train_by_trainer, "llama", str(tmp_path))
