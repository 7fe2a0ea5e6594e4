"""Writes small models and adapters for them, as transformers and peft save them, and what peft
computes with them. With a folder that fsdp wrote, computes the loss of a model."""

import json
import sys

import peft
import torch
import transformers
from hf_models import SIZES, add_tokenizer
from safetensors.torch import save_file

CASES = {
    "llama": (
        transformers.LlamaConfig(**SIZES, attention_bias=True),
        dict(r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]),
    ),
    "qwen3": (
        transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
        dict(r=3, lora_alpha=6, target_modules="all-linear"),
    ),
    "gemma": (
        transformers.GemmaConfig(**SIZES, head_dim=16, pad_token_id=None),
        dict(r=2, lora_alpha=5, target_modules=["o_proj", "gate_proj", "up_proj"]),
    ),
}


def loss_of(model, rows):
    logits = model(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def write_case(out, name, config, options):
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = f"{out}/{name}"
    model.save_pretrained(folder)
    add_tokenizer(folder)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    trained = {}
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.requires_grad:
                param.normal_(0, 0.1)
                short = key.removeprefix("base_model.model.model.").replace(".default", "")
                trained[short] = param
    model.peft_config["default"].base_model_name_or_path = folder
    model.save_pretrained(f"{folder}-adapter")
    rows = torch.randint(config.vocab_size, (4, 33))
    found = {"rows": rows}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(3):
        loss = loss_of(model, rows)
        loss.backward()
        if not losses:
            found |= {"grad." + key: param.grad.clone() for key, param in trained.items()}
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found["losses"] = torch.tensor(losses)
    found |= {"after." + key: param.detach().clone() for key, param in trained.items()}
    save_file(found, f"{out}/{name}.safetensors")


def main(out):
    torch.set_num_threads(1)
    for number, (name, case) in enumerate(CASES.items()):
        torch.manual_seed(number)
        write_case(out, name, *case)
    transformers.AutoModelForCausalLM.from_config(CASES["llama"][0]).save_pretrained(f"{out}/llama-other")


def read_back(folder, tokens):
    """Prints the loss of a model or an adapter on a file of tokens, in one row."""
    auto = peft.AutoPeftModelForCausalLM if "adapter" in folder else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32)
    with open(tokens, "rb") as file:
        row = torch.frombuffer(bytearray(file.read()), dtype=torch.uint16).long()
    with torch.no_grad():
        print(json.dumps({"loss": loss_of(model, row[None]).item()}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        read_back(*sys.argv[1:])
    else:
        main(sys.argv[1])
