"""Holds nibble's tokenizer to the `tokenizers` package: the same ids and the same decoded text.

Runs tests/text/tokenize_lines from $NIBBLE_BUILD_DIR (default build/release). The strings are random with a
fixed seed (NIBBLE_SEED changes it, NIBBLE_STRINGS says how many each variant gets).
"""

import copy
import json
import os
import pathlib
import random
import subprocess

import pytest
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NIBBLE_BUILD_DIR", ROOT / "build" / "release"))
TOKENIZE_LINES = BUILD / "tests" / "tokenize_lines"
SEED = int(os.environ.get("NIBBLE_SEED", "1"))
STRINGS = int(os.environ.get("NIBBLE_STRINGS", "10000"))

DEMO = json.loads((ROOT / "models" / "demo" / "tokenizer.json").read_text())

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = (
    r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2 = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def sequence(*parts):
    return {"type": "Sequence", "pretokenizers": list(parts)}


def demo(**parts):
    variant = copy.deepcopy(DEMO)
    variant.update(copy.deepcopy(parts))
    return variant


def with_model(**options):
    variant = copy.deepcopy(DEMO)
    variant["model"].update(options)
    return variant


def added(*tokens, **parts):
    variant = demo(**parts)
    end = len(variant["model"]["vocab"])
    for content, options in tokens:
        token = {"id": variant["model"]["vocab"].get(content, end), "content": content}
        end += token["id"] == end
        for flag in ("single_word", "lstrip", "rstrip", "normalized", "special"):
            token[flag] = flag in options
        variant["added_tokens"].append(token)
    return variant


def template(before, after):
    pieces = [{"SpecialToken": {"id": token, "type_id": 0}} for token in before]
    pieces.append({"Sequence": {"id": "A", "type_id": 0}})
    pieces += [{"SpecialToken": {"id": token, "type_id": 0}} for token in after]
    ids = {token: DEMO["model"]["vocab"][token] for token in before + after}
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces + [{"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in ids.items()},
    }


def pair_merges():
    return with_model(merges=[merge.split(" ") for merge in DEMO["model"]["merges"]])


TOKENS = [
    ("<left>", ("lstrip", "special")),
    ("<right>", ("rstrip",)),
    ("<both>", ("lstrip", "rstrip", "normalized")),
    ("<word>", ("single_word",)),
    ("<word", ("single_word", "special")),
    ("Ward", ("single_word", "normalized")),
    ("caf\u00e9", ("normalized",)),
    ("  ", ("normalized",)),
    ("<left><", ()),
    ("\u00c5\u0142\u00e9", ("special",)),
    ("the", ()),
    ("\u0120a", ("lstrip",)),
]

VARIANTS = {
    "demo": demo(),
    "llama3": demo(pre_tokenizer=sequence(split(LLAMA3), BYTE_LEVEL)),
    "qwen2": demo(pre_tokenizer=sequence(split(QWEN2), BYTE_LEVEL), normalizer={"type": "NFC"}),
    "o200k": demo(pre_tokenizer=sequence(split(O200K), BYTE_LEVEL)),
    "kimi": demo(pre_tokenizer=sequence(split(KIMI), BYTE_LEVEL)),
    "deepseek": demo(pre_tokenizer=sequence(*map(split, DEEPSEEK), BYTE_LEVEL)),
    "gpt2": demo(pre_tokenizer=GPT2),
    "digits": demo(pre_tokenizer=sequence({"type": "Digits", "individual_digits": True}, GPT2)),
    "digit runs": demo(pre_tokenizer=sequence({"type": "Digits", "individual_digits": False}, BYTE_LEVEL)),
    "removed": demo(pre_tokenizer=sequence(split(r"\s+", "Removed"), BYTE_LEVEL)),
    "inverted": demo(pre_tokenizer=sequence(split(r"\w+|[^\w\s]+", "Removed", True), BYTE_LEVEL)),
    "previous": demo(pre_tokenizer=sequence(split(r"\s|\p{N}", "MergedWithPrevious"), BYTE_LEVEL)),
    "next": demo(pre_tokenizer=sequence(split(r"\s|\p{N}", "MergedWithNext"), BYTE_LEVEL)),
    "contiguous": demo(pre_tokenizer=sequence(split(r"\s|\p{N}", "Contiguous"), BYTE_LEVEL)),
    "previous inverted": demo(pre_tokenizer=sequence(split(r"\p{L}", "MergedWithPrevious", True), BYTE_LEVEL)),
    "literal": demo(pre_tokenizer=sequence(split("'s", "Isolated", kind="String"), GPT2)),
    "literal dot": demo(pre_tokenizer=sequence(split(".", "MergedWithNext", kind="String"), BYTE_LEVEL)),
    "empty matches": demo(pre_tokenizer=sequence(split(r"\s*", "MergedWithPrevious"), BYTE_LEVEL)),
    "lines": demo(pre_tokenizer=sequence(split(r"^.|.$|\bt|e\b|\B ", "Isolated"), BYTE_LEVEL)),
    "intervals": demo(pre_tokenizer=sequence(split(r"\p{L}{1,3}+|\s{2}?|[0-9]{,2}e|\S{2,}?t|a++"), BYTE_LEVEL)),
    "classes": demo(
        pre_tokenizer=sequence(split(r"[\p{L}&&[^a-mA-M]]+|[^\s[0-9]]|[\h\-]+|[[:digit:][:space:]]|\u0301"), BYTE_LEVEL)
    ),
    "ignored case": demo(pre_tokenizer=sequence(split(r"(?i)the|[k-s]+|(?-i:A)|\p{Han}"), BYTE_LEVEL)),
    "no pieces": demo(pre_tokenizer=BYTE_LEVEL),
    "NFC": demo(normalizer={"type": "NFC"}),
    "NFD": demo(normalizer={"type": "NFD"}),
    "NFKC": demo(normalizer={"type": "NFKC"}),
    "NFKD": demo(normalizer={"type": "NFKD"}),
    "normalizers": demo(
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Lowercase"},
                {"type": "Replace", "pattern": {"String": "the"}, "content": "a\u0300 cat"},
                {"type": "NFC"},
                {"type": "Prepend", "prepend": "_ "},
            ],
        }
    ),
    "added": added(*TOKENS),
    "added NFC": added(*TOKENS, normalizer={"type": "NFC"}),
    "added lowercase": added(
        *TOKENS, normalizer={"type": "Lowercase"}, pre_tokenizer=GPT2, post_processor=template(["<|user|>"], [])
    ),
    "pair merges": pair_merges(),
    "merges with a head line": with_model(merges=["#version: 0.2", *DEMO["model"]["merges"]]),
    "ignore_merges": with_model(ignore_merges=True),
    "template": demo(post_processor=template(["<|endoftext|>", "<|user|>"], ["<|end|>"])),
    "template in sequence": demo(
        post_processor={"type": "Sequence", "processors": [GPT2, template(["<|endoftext|>"], [])]}
    ),
    "no decoder": demo(decoder=None),
    "empty decoder": demo(decoder={"type": "Sequence", "decoders": []}),
    "decoders": demo(decoder={"type": "Sequence", "decoders": [GPT2, {"type": "Fuse"}]}),
    "unknown": with_model(unk_token="<|pad|>", vocab={k: v for k, v in DEMO["model"]["vocab"].items() if k != "\u00d0"},
                          merges=[m for m in DEMO["model"]["merges"] if "\u00d0" not in "".join(m)]),
    "fused unknown": demo(pre_tokenizer=None, model={**DEMO["model"], "unk_token": "<|pad|>", "fuse_unk": True}),
    "truncated and padded": demo(truncation=None, padding=None),
}

WORDS = (
    "the The THE cat don't it's We'Re I'M can't'S 'ſ 'K na\u00efve cafe\u0301 caf\u00e9 \u00c6on \u0130stanbul Stra\u00dfe \ufb01ne "
    "\u4e2d\u6587 \u65e5\u672c\u8a9e \u30ab\u30bf\u30ab\u30ca \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 x1 3.14159 2024 1e-5 \u0663\u0664 \u216b \u00bd \u00b2 int main() { return 0; } "
    "https://example.com/?q=1&r=2 <word> <word >word <left> <right> <both> Ward Warden <left>< <word<word> "
    "\u00c5\u0142\u00e9 \u0120a \u2160 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f680 \ufeff"
).split(" ")
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\u0085", "\u180e", "\u200b", "\x0b", "\u2028", "\x1f"]
SPECIAL = [token["content"] for token in DEMO["added_tokens"]] + [content for content, _ in TOKENS]
MARKS = [chr(c) for c in range(0x300, 0x370)] + list("\u0323\u0307\u0345\u0334\u093c\u3099\u05b0\u0e38\U0001d165\U000110ba")
# Blocks of every kind, the newest too.
BLOCKS = [(0x20, 0x7F), (0x80, 0x250), (0x250, 0x800), (0x800, 0x1100), (0x1100, 0x1200), (0x1E00, 0x2000),
          (0x2000, 0x2C00), (0x2E80, 0x3400), (0x4E00, 0x4E80), (0xA000, 0xAC00), (0xAC00, 0xAC80), (0xF900, 0x10000),
          (0x10000, 0x10800), (0x10800, 0x11800), (0x11800, 0x12000), (0x16000, 0x17000), (0x1B000, 0x1B200),
          (0x1D000, 0x1E000), (0x1E000, 0x1F000), (0x1F000, 0x20000), (0x2EB00, 0x2EE80), (0x2F800, 0x2FA20),
          (0x31350, 0x32400), (0xE0000, 0xE0200)]  # fmt: skip


def random_character(rng):
    while True:
        if rng.random() < 0.2:
            code = rng.randrange(0x110000)
        else:
            code = rng.randrange(*rng.choice(BLOCKS))
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def random_string(rng):
    kind = rng.randrange(8)
    length = rng.choice((0, 1, 2, 5, 12, 30))
    if kind == 0:
        return "".join(random_character(rng) for _ in range(length))
    if kind == 1:
        return "".join(chr(rng.randrange(0x80)) for _ in range(length))
    if kind == 2:
        return "".join(rng.choice(WORDS + SPACES) for _ in range(length))
    if kind == 3:
        return "".join(rng.choice(SPACES + [rng.choice("a1.<'\u00e9")]) for _ in range(length))
    if kind == 4:
        return "".join(rng.choice("aeo\u00e5\u1100\u1161\u11a8\uac00\u0928\u304b\u00c5") + "".join(rng.choices(MARKS, k=rng.randrange(4))) for _ in range(length))
    if kind == 5:
        return "".join(rng.choice("0123456789.,eE+- \u0665\u216b\U0001d7d8") for _ in range(length))
    pool = (WORDS, SPACES, SPECIAL, MARKS)
    return "".join(
        random_character(rng) if rng.random() < 0.3 else rng.choice(rng.choice(pool)) for _ in range(length)
    )


def random_strings():
    rng = random.Random(SEED)
    return [random_string(rng) for _ in range(STRINGS)]


def every_character():
    """The code points of planes 0 to 3 and 14, and some of the rest, which is private or unassigned, a few in
    each string, between characters that show what they are."""
    codes = [
        code
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000
        and (code % 64 == 0 or not (0x32400 <= code < 0xE0000 or 0xE0200 <= code or 0xE000 <= code < 0xF900))
    ]
    chunks = [codes[i : i + 16] for i in range(0, len(codes), 16)]
    return ["".join(f"x{chr(code)}a\u0315{chr(code)}\u0334<word>{chr(code)} <left>" for code in chunk) for chunk in chunks]


def nibble(directory, strings, *flags):
    text = "".join(json.dumps(string) + "\n" for string in strings)
    done = subprocess.run([TOKENIZE_LINES, directory, *flags], input=text.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(variant, strings, directory, flags=(), parse_special=True, add_special=True, skip_special=True):
    text = json.dumps(variant)
    (directory / "tokenizer.json").write_text(text)
    package = tokenizers.Tokenizer.from_str(text)
    package.encode_special_tokens = not parse_special
    package.no_truncation()
    package.no_padding()
    answers = nibble(directory, strings, *flags)
    assert len(answers) == len(strings)
    differing = []
    for string, answer in zip(strings, answers):
        ids = package.encode(string, add_special_tokens=add_special).ids
        wanted = {"ids": ids, "decoded": package.decode(ids, skip_special_tokens=skip_special)}
        if answer != wanted:
            differing.append((string, wanted, answer))
    assert not differing, f"{len(differing)} of {len(strings)} differ, the shortest: " + repr(
        min(differing, key=lambda d: len(d[0]))
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_random_strings(name, tmp_path):
    compare(VARIANTS[name], random_strings(), tmp_path)


@pytest.mark.parametrize("name", ["demo", "added NFC", "added lowercase"])
def test_options(name, tmp_path):
    strings = random_strings()
    compare(VARIANTS[name], strings, tmp_path, ("--no-parse-special",), parse_special=False)
    compare(VARIANTS[name], strings, tmp_path, ("--no-add-special",), add_special=False)
    compare(VARIANTS[name], strings, tmp_path, ("--keep-special",), skip_special=False)


@pytest.mark.parametrize(
    "name", ["llama3", "o200k", "kimi", "deepseek", "digit runs", "inverted", "NFC", "NFD", "NFKC", "NFKD", "added lowercase"]
)
def test_every_character(name, tmp_path):
    compare(VARIANTS[name], every_character(), tmp_path)


def test_the_comparison_can_fail(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(VARIANTS["gpt2"]))
    ours = nibble(tmp_path, ["12345 it's"])
    assert ours[0]["ids"] != tokenizers.Tokenizer.from_str(json.dumps(VARIANTS["llama3"])).encode("12345 it's").ids
