"""Writes folders with the tokenizer.json of small tokenizers of SentencePiece's kind, configured as
those of Llama 2, Mistral and Gemma and in other ways, and what the package tokenizers computes with
them. Writes also folders that must be refused, and the conversations of several templates."""

import copy
import json
import os
import random
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import chats_made
import tokenizers_made
from tokenizers_made import CODE, UNUSUAL, library_files, write, write_expected

MARK = "▁"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TURNS = ["[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"]

PREPEND = {"type": "Prepend", "prepend": MARK}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
SPACES = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def metaspace(scheme, split):
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": split}


def sequence(name, *parts):
    return {"type": "Sequence", name: list(parts)}


def added(token, content, special=True, normalized=False):
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": token, "content": content, **flags, "normalized": normalized, "special": special}


def trained(lines, size, divides=True):
    """The words of a vocabulary, and its merges."""
    tokenizer = Tokenizer(models.BPE())
    if divides:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=130, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return list(model["vocab"]), [tuple(merge) for merge in model["merges"]]


def make(folder, learned, special, others=(), **fields):
    """`others`: tokens that are added behind the vocabulary, with their flags."""
    words, merges = learned
    names = [*special, *BYTES, *(word for word in words if word not in special)]
    vocab = {name: token for token, name in enumerate(names)}
    tokens = [added(token, name) for token, name in enumerate(special)]
    for name, flags in others:
        tokens.append(added(vocab.setdefault(name, len(vocab)), name, **flags))
    begin = fields.pop("begin", "<s>")
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None}
    model.update({"end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True})
    model.update(fields.pop("model", {}))
    model.update({"vocab": vocab, "merges": fields.pop("merges", lambda pairs: pairs)(merges)})
    post_processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": begin, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [vocab[begin]], "tokens": [begin]}},
    }
    all_fields = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens}
    all_fields.update({"normalizer": None, "pre_tokenizer": None, "post_processor": post_processor})
    all_fields.update({**fields, "model": model})
    os.makedirs(folder)
    write(f"{folder}/tokenizer.json", all_fields)


def make_good(out):
    files = [*library_files(), *UNUSUAL * 20, CODE * 20]
    lines = [line.replace("\t", " ") for file in files for line in file.splitlines()]
    words = trained(lines, 1200)  # without line ends, as Llama 2 has it
    with_lines = trained(files, 1300)
    # Tokens that begin, end and go on anywhere.
    text = "".join(files)
    pieces = [text[at : at + 60] for at in range(0, 200000, 60)]
    anywhere = trained(pieces, 900, divides=False)
    marked = trained([piece.replace(" ", MARK) for piece in pieces], 900, divides=False)

    llama = ["<unk>", "<s>", "</s>"]
    as_text = lambda merges: [" ".join(merge) for merge in merges]
    llama_decoder = sequence("decoders", SPACES, FALLBACK, FUSE, STRIP)
    both = sequence("normalizers", PREPEND, REPLACE)
    make(f"{out}/llama2", words, llama, merges=as_text, normalizer=both, decoder=llama_decoder)
    make(
        f"{out}/mistral", words, [*llama, "[INST]", "[/INST]"], model={"ignore_merges": False},
        pre_tokenizer=metaspace("first", False), decoder=llama_decoder,
    )
    lines = [("\n" * count, {"special": False}) for count in range(1, 6)]
    blanks = [(MARK * count, {"special": False}) for count in range(2, 5)]
    make(
        f"{out}/gemma", with_lines, ["<pad>", "<eos>", "<bos>", "<unk>", *TURNS[2:]], [*lines, *blanks],
        begin="<bos>", normalizer=REPLACE, pre_tokenizer=SPLIT, decoder=sequence("decoders", SPACES, FALLBACK, FUSE),
    )
    # Not as a family has it: all else that is supported.
    tool = [("<tool>", {"special": False, "normalized": True})]
    whole = {"unk_token": None, "fuse_unk": False, "ignore_merges": True}
    make(
        f"{out}/whole-words", with_lines, llama, tool, model=whole, pre_tokenizer=metaspace("always", True),
        decoder=sequence("decoders", FALLBACK, metaspace("always", True)),
    )
    make(
        f"{out}/marked", marked, llama, [*tool, ("x\n", {"special": False})], normalizer=both,
        decoder=sequence("decoders", SPACES, FALLBACK, FUSE, {**STRIP, "start": 2}),
    )
    make(
        f"{out}/always", words, llama, [*tool, ("\n", {"special": False, "normalized": True})],
        pre_tokenizer=metaspace("always", False), decoder=metaspace("never", False),
    )
    make(f"{out}/spaces", anywhere, llama, pre_tokenizer=SPLIT, decoder=FALLBACK)
    return ["llama2", "mistral", "gemma", "whole-words", "marked", "always", "spaces"]


def texts():
    yield from tokenizers_made.texts()
    yield from [MARK, MARK * 3, f" {MARK} a{MARK}b", f"{MARK}a", f"a {MARK}", "<0x0A>", "a<0x41>b", "<0x", "\0"]
    yield from ["one two  three   four    five ", "\n a\n\n b\n\n\n\n\n\n c", "a\tb\t\tc", "x\x00\x01\x7fy"]
    for token in ["<s>", "</s>", "<unk>", *TURNS, "x\n"]:
        yield from [token, token * 2, f"a{token}b", f"a {token} b", f" {token}", f"{token} ", token[:-1]]
    for token in ["<tool>", "<s>", "\n"]:
        yield from [f"<s>{token}a", f"{token}<s> a", f"{token} {token}a", f"b{token}"]
    draw = random.Random(2)
    mixed = [*" \n\t<>ab.é▁日😀\u0301\x01", "  ", "\n\n", "<s>", "<tool>", "</s>", "x\n"]
    mixed += ["the", " self", "[INST]", "<0x41>"]
    for _ in range(300):
        yield "".join(draw.choices(mixed, k=draw.randint(1, 40)))


def some_tokens(draw, tokenizer):
    """Tokens that no text becomes: many bytes, whole characters and halves of them."""
    size = tokenizer.get_vocab_size()
    result = []
    for _ in range(draw.randint(1, 12)):
        char = draw.choice("é日😀a\n ▁")
        as_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in char.encode()]
        result += draw.choice([as_bytes, as_bytes[:1], [draw.randrange(size)], tokenizer.encode(f"{char} a").ids])
    return result


def make_bad(out):
    words = {}

    def bad(name, word, change, of="llama2"):
        with open(f"{out}/{of}/tokenizer.json", encoding="utf-8") as file:
            fields = json.load(file)
        change(fields)
        os.makedirs(f"{out}/bad-{name}")
        write(f"{out}/bad-{name}/tokenizer.json", fields)
        words[f"bad-{name}"] = word

    def field(name, value):
        return lambda of: of.update({name: value})

    lacks = "model: byte_fallback is true, but the vocabulary lacks <0xEF>"
    bad("no-byte", lacks, lambda of: of["model"]["vocab"].pop("<0xEF>"))
    bad("merge", "merge", lambda of: of["model"]["merges"].append(["qqzz", "a"]))
    bad("half-merge", "merge", lambda of: of["model"]["merges"].append("qqzz"))
    bad("no-unk", "model: the vocabulary lacks the unk_token", lambda of: of["model"].update(unk_token="<none>"))
    bad("no-fallback", "without byte_fallback", lambda of: of["model"].update(byte_fallback=False))
    bad("suffix", "end_of_word_suffix", lambda of: of["model"].update(end_of_word_suffix="</w>"))
    bad("nfc", "normalizer: NFC", field("normalizer", {"type": "NFC"}))
    bad("prepend", "normalizer: Prepend", field("normalizer", {**PREPEND, "prepend": "x"}))
    bad("replace", "normalizer: Replace", field("normalizer", {**REPLACE, "pattern": {"Regex": " +"}}))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False}
    bad("byte-level", "pre_tokenizer: ByteLevel", field("pre_tokenizer", byte_level))
    bad("split", "pre_tokenizer: Split", field("pre_tokenizer", {**SPLIT, "behavior": "Isolated"}))
    bad("invert", "invert", field("pre_tokenizer", {**SPLIT, "invert": True}))
    bad("mark", "replacement '_'", field("pre_tokenizer", {**metaspace("first", False), "replacement": "_"}))
    bad("scheme", "prepend_scheme", field("pre_tokenizer", metaspace("often", False)))
    bad("no-decoder", "decoder: null", field("decoder", None))
    bad("decoder", "decoder: WordPiece", field("decoder", {"type": "WordPiece", "prefix": "##", "cleanup": True}))
    bad("stop", "decoder: Strip: stop", field("decoder", {**STRIP, "stop": 1}))
    bad("fused", "ByteFallback after Fuse", field("decoder", sequence("decoders", FUSE, FALLBACK)))
    twice = [added(300, f"{word}x", special=False, normalized=True) for word in (" ", MARK)]
    twice[1]["id"] = 301
    bad("twice", "text of another added token", lambda of: of["added_tokens"].extend(twice))
    bad("rstrip", "rstrip", lambda of: of["added_tokens"][1].update(rstrip=True))
    write(f"{out}/refused.json", words)


def main(out):
    names = make_good(out)
    all_texts = list(texts())
    for name in names:
        tokenizer = write_expected(f"{out}/{name}", all_texts)
        draw = random.Random(3)
        drawn = [some_tokens(draw, tokenizer) for _ in range(300)]
        decoded = [{"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=False)} for ids in drawn]
        write(f"{out}/{name}/decoded.json", decoded)
    make_bad(out)
    chats_made.write_families(out)
    print(" ".join(names))


if __name__ == "__main__":
    main(sys.argv[1])
