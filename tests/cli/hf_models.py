"""Writes folders of small models with random weights, as transformers saves them, and what
transformers computes with them. The test reads both."""

import json
import os
import shutil
import sys

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def rope(base, **scaling):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **scaling}}


CASES = {
    "llama": transformers.LlamaConfig(**SIZES, **rope(50000.0)),
    "llama-tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "llama-wide-heads": transformers.LlamaConfig(**SIZES, head_dim=32),
    "llama3.1": transformers.LlamaConfig(**SIZES, **rope(500.0, **LLAMA3)),
    "llama-linear": transformers.LlamaConfig(**SIZES, **rope(500.0, rope_type="linear", factor=3.0)),
    "mistral": transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=7),
    "mistral-no-window": transformers.MistralConfig(**SIZES, head_dim=24, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen2-window": transformers.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=True),
    "qwen3-biases": transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    # No padding token: PyTorch gives it no gradient as an input, and rows of text have none.
    "gemma": transformers.GemmaConfig(**SIZES, head_dim=32, pad_token_id=None),
    # The caps are low, so that they make a difference.
    "gemma2": transformers.Gemma2Config(
        **SIZES,
        head_dim=16,
        pad_token_id=None,
        sliding_window=7,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
    ),
    "gemma2-no-caps": transformers.Gemma2Config(
        **SIZES,
        head_dim=32,
        pad_token_id=None,
        attention_bias=True,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        pad_token_id=None,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=24,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gemma3-all-slide": transformers.Gemma3TextConfig(
        **SIZES, head_dim=24, pad_token_id=None, sliding_window=9, tie_word_embeddings=False
    ),
}


def with_old_fields(config):
    """config.json as transformers before version 5 wrote it."""
    parameters = config.pop("rope_parameters")
    types = config.pop("layer_types", [])
    if "sliding_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        config["sliding_window_pattern"] = types.index("full_attention") + 1
        parameters = parameters["full_attention"]
    config["rope_theta"] = parameters.pop("rope_theta")
    config["torch_dtype"] = config.pop("dtype", "float32")
    if parameters["rope_type"] != "default":
        config["rope_scaling"] = parameters
    return config


def read_back(folder, out):
    """What transformers computes with a folder that fsdp wrote."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: found for key, found in info.items() if found}
    assert not wrong, wrong
    rows = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = model(rows[:, :-1]).logits
    save_file({"rows": rows, "logits": logits.contiguous()}, out)


def print_tokens(folder):
    """Which tokens transformers takes for special in a folder that fsdp wrote."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    has_tokenizer = os.path.exists(f"{folder}/tokenizer.json")
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json") if has_tokenizer else None
    found = {
        "bos": config.bos_token_id,
        "eos": config.eos_token_id,
        "generates_until": model.generation_config.eos_token_id,
        "tokenizer": tokenizer and tokenizer.encode("import torch").ids,
    }
    print("\n" + json.dumps(found))


def generate(model, prompt, **options):
    """The tokens that transformers finds likeliest, one after another."""
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=40, do_sample=False, **options)[0, prompt.shape[1] :]


def add_tokenizer(folder):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([__file__], trainer)
    tokenizer.save(f"{folder}/tokenizer.json")
    write(f"{folder}/tokenizer_config.json", {"eos_token": end})
    return tokenizer


def continue_text(folder, model):
    """Writes how the model continues a text, and a folder whose model stops on the way."""
    tokenizer = add_tokenizer(folder)
    prompt = "import torch\n# Größe"
    without_meaning = list(range(tokenizer.get_vocab_size(), model.config.vocab_size))
    tokens = generate(
        model, torch.tensor([tokenizer.encode(prompt).ids]), suppress_tokens=without_meaning
    ).tolist()
    stop = next(token for token in tokens if token != tokens[0])
    shutil.copytree(folder, f"{folder}-stops")
    write(f"{folder}-stops/generation_config.json", {"eos_token_id": [5000, stop]})
    write(f"{folder}/continued.json", {"prompt": prompt, "tokens": tokens})
    write(f"{folder}-stops/continued.json", {"prompt": prompt, "tokens": tokens[: tokens.index(stop)]})


def mean_loss(model, tokens, context):
    """The mean loss of all tokens but the first, in rows of `context` tokens."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, context):
            row = tokens[start : start + context + 1]
            scores = model(row[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(scores, row[1:], reduction="sum").double()
    return total / (len(tokens) - 1)


def write(path, fields):
    with open(path, "w") as file:
        json.dump(fields, file)


def main(out):
    torch.set_num_threads(1)
    for number, (name, config) in enumerate(CASES.items()):
        torch.manual_seed(number)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.normal_(1 if "norm" in key and not name.startswith("gemma") else 0, 0.1)
        folder = f"{out}/{name}"
        # Several files for one model, and one for the next.
        model.save_pretrained(folder, max_shard_size="60KB" if number % 2 == 0 else "5GB")
        if number % 3 == 0:
            path = f"{folder}/config.json"
            with open(path) as file:
                fields = with_old_fields(json.load(file))
            write(path, fields)

        if name == "qwen3":
            continue_text(folder, model)
        rows = torch.randint(config.vocab_size, (4, 33))
        tokens, targets = rows[:, :-1], rows[:, 1:]
        found = {"rows": rows}

        def loss_of(model):
            logits = model(tokens).logits
            return logits, torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

        logits, loss = loss_of(model)
        found["logits"] = logits.detach()
        found["mean_loss"] = mean_loss(model, rows.flatten(), 20)
        found["generated"] = generate(model, rows[:1, :9])
        found["loss"] = loss.detach()
        loss.backward()
        params = {key.removeprefix("model."): param for key, param in model.named_parameters()}
        for key, param in params.items():
            found["grad." + key] = param.grad.clone()
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).step()
        for key, param in params.items():
            found["after." + key] = param.detach().clone()
        half = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager"
        )
        with torch.no_grad():
            found["bf16"] = half(tokens).logits.float()
        save_file({key: value.contiguous() for key, value in found.items()}, f"{out}/{name}.safetensors")
    print(" ".join(CASES))


if __name__ == "__main__":
    if sys.argv[1] == "tokens":
        print_tokens(sys.argv[2])
    elif len(sys.argv) == 3:
        read_back(*sys.argv[1:])
    else:
        main(sys.argv[1])
