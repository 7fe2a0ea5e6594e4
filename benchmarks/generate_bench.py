"""`./fsdp bench generate`: tokens per second of `fsdp generate`, next to transformers on the same cores.

Both continue the same prompt with a Qwen3 of random weights, one token at a time with kept keys and values,
and take the likeliest token. They run in turns, so that a slow moment of the machine meets both.
"""

import argparse
import logging
import os
import re
import statistics
import subprocess
import tempfile
import time

import torch

logging.disable(logging.WARNING)  # of libraries that transformers imports
import transformers  # noqa: E402

SIZES = {
    "100m": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048),
    "500m": dict(hidden_size=1280, num_hidden_layers=24, num_attention_heads=20, intermediate_size=3456),
}
PROMPT = "To be, or not to be, that is the question: whether"


def config_of(size):
    return transformers.Qwen3Config(
        **SIZES[size],
        vocab_size=32_000,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def tokens_per_second_of_fsdp(folder, options):
    """The tool prints the time without loading the weights."""
    command = [os.environ["FSDP_TOOL"], "generate", "--checkpoint", folder, "--tokenizer", "bytes"]
    command += ["--prompt", PROMPT, "--tokens", str(options.tokens), "--temperature", "0"]
    command += ["--dtype", options.dtype, "--stats"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found = re.search(r"([\d.]+) per second", done.stderr)
    if done.returncode != 0 or not found:
        raise SystemExit(f"fsdp generate failed:\n{done.stderr}")
    return float(found[1])


def tokens_per_second_of_transformers(model, options):
    prompt = torch.tensor([list(PROMPT.encode())])  # each byte is a token, as with the tool
    start = time.perf_counter()
    model.generate(prompt, max_new_tokens=options.tokens, min_new_tokens=options.tokens, do_sample=False)
    return options.tokens / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(prog="./fsdp bench generate", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="100m")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config_of(options.size)).to(dtype).eval()
    rates = {"fsdp generate": [], "transformers": []}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for _ in range(options.rounds + 1):  # the first round warms up
            rates["fsdp generate"].append(tokens_per_second_of_fsdp(folder, options))
            rates["transformers"].append(tokens_per_second_of_transformers(model, options))
    medians = {name: statistics.median(values[1:]) for name, values in rates.items()}
    numel = sum(param.numel() for param in model.parameters())
    print(f"Qwen3 of {numel / 1e6:.0f} million parameters in {options.dtype}, {options.tokens} new tokens,")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads\n")
    print("| | tokens per second | to transformers |")
    print("|---|---|---|")
    for name, rate in medians.items():
        print(f"| {name} | {rate:.1f} | {rate / medians['transformers']:.2f} |")


if __name__ == "__main__":
    main()
