"""Writes folders with the tokenizer.json of small tokenizers, and what the package tokenizers
computes with them. Writes also folders that must be refused. The test reads both."""

import json
import os
import random
import sys
import unicodedata

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BEGIN, END, START = "<|begin_of_text|>", "<|endoftext|>", "<|im_start|>"
HEADERS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

# In every vocabulary, but no merges lead to them: only ignore_merges finds these, and only where
# a whole piece is such a word.
WHOLE_WORDS = ["antidisestablishment", " Größenwahn", "!?!?!?!?"]

# U+180E is whitespace for PCRE2's \s and not for the package's. U+1C89 and U+1C8A are letters since
# Unicode 16: the package knows that, and an older PCRE2 does not.
LEFT_OUT = {0x180E, 0x1C89, 0x1C8A}

UNUSUAL = [
    "Les élèves naïfs; a\u0301 e\u0301 n\u0303 A\u030a o\u0302\u0323 o\u0323\u0302",
    "\u212b \u2126 \u0344 \u0958 \u0344\u0301",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \u1100\u1161 \uac00\u11a8 한글 \u3131\u314f",
    "日本語の文章、中文句子。「引用」 １２３ 四五六\u3000全角\u3000\u3000空白",
    "مرحبا بالعالم ١٢٣٤٥ ۱۲۳ שָׁלוֹם हिन्दी १२३४ ไทย ๑๒๓ ½ Ⅷ ² ①",
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ❤️ 🇩🇪🇫🇷 1️⃣ \U0001d400\U0001d7d8 \U00020000 \U0010fffd",
    "Привет, мир! Γειά σου Κόσμε ẞß ſt ﬃ İı Ω≠Ω",
]

CODE = '''
template <class T>\r\n\tstd::vector<T> f(const T& x) {\r\n\t\treturn {x, x+1, 0x1F, 1e-10};  // ok\r\n\t}
def f(self, *args, **kwargs):\n    """What's this?"""\n\n    return [i ** 2 for i in range(1000)]\n\n\n
'''


def library_files():
    """Files of the standard library: text that every Python has."""
    folder = os.path.dirname(os.__file__)
    for name in ("argparse.py", "ast.py", "datetime.py", "inspect.py", "textwrap.py", "unittest/mock.py"):
        with open(f"{folder}/{name}", encoding="utf-8") as file:
            yield file.read()


def is_new_mark(code):
    """The NFC of the package knows the combining marks of Unicode 9 and no newer ones."""
    nfc = normalizers.NFC().normalize_str
    marked = ["a" + chr(code) + mark for mark in "\u0301\u0323"]
    return any(nfc(text) != unicodedata.normalize("NFC", text) for text in marked)


def texts():
    draw = random.Random(1)
    yield from ["", " ", "  ", "\t", "\n", "\r\n", "a", " a", "a ", "  a  ", "a\0b", "\ufeffa\ufeff"]
    yield from ["\t\ta\t \tb\t\t", " \n", "\n ", " \n \n  x", "a\n\n\n\nb", "a\r\n\r\n b\r\r"]
    yield from ["\n" * 50, "a" + " \n" * 9, "x\x0b\x0c\x1c\x1fy", "\u00a0", "\u3000\u3000"]
    yield "a\u00a0b \u00a0 c\u2003\u2003d\u2028e\u2029f\u0085g\u3000"
    yield from [" " * 20000 + "x", "x" + " " * 3000, " " * 1000 + "\n" + " " * 1000]
    yield "I'm you're he'S we'LL I'Ve can'T 'D 'ſ it'ſ 'sx ''s 'l 'll' 'RE' don’t 's't'm"
    yield " ".join("1234567"[:n] for n in range(1, 8))
    yield from ["a1b22c333 4444,55555.666666", "٣٤٥٦ १२३४५ １２３４ ¼½¾ ⅷⅨ"]
    yield from ["a" * 3000, "".join(draw.choices("abcdefghijklmnopqrstuvwxyzABCéß", k=5000)), "=" * 700]
    yield from [CODE, CODE * 3, *UNUSUAL, "".join(UNUSUAL)]

    for word in WHOLE_WORDS:
        yield from [word, word + "arianism", word + word, "x" + word, word + "."]
        yield f"{word} {word}\n{word}"

    for token in (BEGIN, END, START, "<|im_end|>", "<tool>"):
        yield from [token, token + token, token[:-2], token[1:], token[:4] + token, token.upper()]
        yield from [f"a {token} b", f"a{token}b", f"  {token}\n\n{token}  ", f"<{token}>"]
        yield from [f"{token}'s 12{token}34", f"e{token}\u0301"]
        yield token + "\u0338 x"  # NFC makes one character of ">" and this mark
    yield from [f"<to{START}ol>", f"<tool{END}>", f"{START}user\nHi <tool>{END}\n{START}\n<tool><tool>"]

    codes = [code for code in range(1, 0x3101) if code not in LEFT_OUT and not is_new_mark(code)]
    for start in range(0, len(codes), 64):
        chunk = [chr(code) for code in codes[start : start + 64]]
        yield "".join(chunk)
        yield "".join(f"x{char}1{char} {char}{char}." for char in chunk)  # shows the class of each

    mixed = [*" \n\t\r'aAsStT1290.,-_<>|é\u0323ſ\u00a0\u3000\u2028日本한\u1100\u1161\u11a8مर१Ω½👍\u200d\ufe0f🏽"]
    mixed += ["  ", "'ll", "\r\n", START, "<tool>", "e\u0301", "the", " def", "self."]
    for _ in range(200):
        yield "".join(draw.choices(mixed, k=draw.randint(1, 60)))

    yield "\n".join([*UNUSUAL, *library_files()])[:200000]


def make(
    folder, size, pre_tokenizer, post_processor, special, normalizer=None, whole=False, listed=False, texts=None
):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts or [*library_files(), *UNUSUAL * 20, CODE * 20], trainer)

    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WHOLE_WORDS:
        vocab[as_bytes.pre_tokenize_str(word)[0][0]] = len(vocab)
    if listed:
        vocab[END] = len(vocab)  # GPT-2 has it among the words and among the added tokens
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=whole)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if normalizer:
        tokenizer.add_tokens([AddedToken("<tool>", normalized=True)])
    tokenizer.post_processor = post_processor(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    os.makedirs(folder)
    tokenizer.save(f"{folder}/tokenizer.json")


def split(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def template(single, token):
    return lambda tokenizer: processors.TemplateProcessing(
        single=single, special_tokens=[(token, tokenizer.token_to_id(token))]
    )


# What a conversation looks like. "generation" marks what is learned.
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}\
{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}\
{% endfor %}"""
LLAMA3_CHAT = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}\
{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}\
{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"""
CHATS = [
    [("user", "Hello!"), ("assistant", "Hi, how are you?")],
    [("system", "Be brief."), ("user", "1 + 1?\n\nThink."), ("assistant", "2"), ("user", "Why?"), ("assistant", "é\n")],
    [("user", "\n\nHi\n"), ("system", " now"), ("assistant", "\u3042")],
    [("assistant", "I begin.\n\n  def f():\n    pass "), ("user", "")],
]


def write_chats(folder, chat_template, begin=None):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", chat_template=chat_template, bos_token=begin
    )
    found = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        found.append({"messages": messages, "ids": made["input_ids"], "learned": made["assistant_masks"]})
    write(f"{folder}/chats.json", found)


def make_good(out):
    plain = lambda _: processors.ByteLevel(trim_offsets=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    begin = template(f"{BEGIN} $A", BEGIN)
    both = lambda tokenizer: processors.Sequence([plain(tokenizer), begin(tokenizer)])
    make(f"{out}/llama3", 1400, split(LLAMA3), both, [BEGIN, "<|end_of_text|>", *HEADERS], whole=True)
    make(f"{out}/qwen", 1000, split(QWEN), plain, [END, START, "<|im_end|>"], normalizer=normalizers.NFC())
    make(f"{out}/gpt2", 700, gpt2, plain, [END], listed=True)
    # The only one with a token behind the document.
    make(f"{out}/old-merges", 500, gpt2, template(f"$A {END}", END), [END])
    fields = read(f"{out}/old-merges")
    merges = fields["model"]["merges"]
    old = isinstance(merges[0], str)
    fields["model"]["merges"] = [merge.split(" ") if old else " ".join(merge) for merge in merges]
    write(f"{out}/old-merges/tokenizer.json", fields)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    make(f"{out}/no-pattern", 300, whole, plain, [END], texts=[CODE * 20])  # words go over line ends
    return ["llama3", "qwen", "gpt2", "old-merges", "no-pattern"]


def read(folder):
    with open(f"{folder}/tokenizer.json", encoding="utf-8") as file:
        return json.load(file)


def write(path, fields):
    with open(path, "w") as file:
        file.write(json.dumps(fields))


def make_bad(out):
    words = {}

    def bad(name, word, change, of="gpt2"):
        fields = read(f"{out}/{of}")
        change(fields)
        os.makedirs(f"{out}/bad-{name}")
        write(f"{out}/bad-{name}/tokenizer.json", fields)
        words[f"bad-{name}"] = word

    def model(**changed):
        return lambda fields: fields["model"].update(changed)

    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    bad("unigram", "Unigram", model(type="Unigram"))
    bad("wordpiece", "WordPiece", model(type="WordPiece"))
    bad("lowercase", "Lowercase", lambda of: of.update(normalizer={"type": "Lowercase"}), "qwen")
    bad("metaspace", "Metaspace", lambda of: of.update(pre_tokenizer=metaspace))
    bad("prefix-space", "add_prefix_space", lambda of: of["pre_tokenizer"].update(add_prefix_space=True))
    removed = lambda of: of["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed")
    bad("removed", "Removed", removed, "llama3")
    hex_digits = lambda of: of["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\h+"})
    bad("hex-digits", r"\h", hex_digits, "llama3")
    bad("lstrip", "lstrip", lambda of: of["added_tokens"][0].update(lstrip=True))
    bad("byte-fallback", "byte_fallback", model(byte_fallback=True))
    bad("dropout", "dropout", model(dropout=0.1))
    bad("no-byte", "byte", lambda of: of["model"]["vocab"].pop("ÿ"))  # 0xff is in no merge
    bad("merge", "merge", lambda of: of["model"]["merges"].append(["qqzz", "a"]))

    for name, text in {"truncated": json.dumps(read(f"{out}/gpt2"))[:5000], "list": "[1, 2]"}.items():
        os.makedirs(f"{out}/bad-{name}")
        with open(f"{out}/bad-{name}/tokenizer.json", "w") as file:
            file.write(text)
    os.makedirs(f"{out}/bad-empty")
    words.update({"bad-truncated": "parse error", "bad-list": "object", "bad-empty": "tokenizer.json"})
    write(f"{out}/refused.json", words)


def write_expected(folder, all_texts):
    """Writes what a folder's tokenizer makes of texts. Returns the tokenizer."""
    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    found = []
    for text in all_texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        special = tokenizer.encode(text).ids
        found.append({"text": text, "ids": ids, "with_special": special, "decoded": decoded})
    write(f"{folder}/expected.json", found)
    return tokenizer


def main(out):
    names = make_good(out)
    all_texts = list(texts())
    for name in names:
        write_expected(f"{out}/{name}", all_texts)
    write_chats(f"{out}/qwen", CHATML)
    write_chats(f"{out}/llama3", LLAMA3_CHAT, BEGIN)
    make_bad(out)
    print(" ".join(names))


if __name__ == "__main__":
    main(sys.argv[1])
