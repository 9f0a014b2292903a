"""Holds the tokenizers that GGUF files describe to those that they stand for: `tokenizers` for the byte-level
ones, with the patterns as tokenizer_test.py has them, and `sentencepiece` for the others.

Files are written by the `gguf` package. NIBBLE_SEED and NIBBLE_STRINGS as in tokenizer_test.py; of the strings each
file gets a quarter.
"""

import io
import json
import pathlib
import random

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizer_test import (
    BYTE_LEVEL, DEEPSEEK, DEMO, GPT2, LLAMA3, O200K, QWEN2, SEED, STRINGS, demo, nibble, random_string, sequence, split,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
TYPE = gguf.TokenType
NO_SPACE_GPT2 = {**GPT2, "add_prefix_space": False}
LINES = split(r"[^\n]+|[\n]+")

# `pre` -> what the tokenizer.json of such a model says.
VARIANTS = {
    "gpt-2": demo(pre_tokenizer=NO_SPACE_GPT2),
    "smollm": demo(pre_tokenizer=sequence({"type": "Digits", "individual_digits": True}, NO_SPACE_GPT2)),
    "glm4": demo(pre_tokenizer=sequence(split(LLAMA3), BYTE_LEVEL)),
    "qwen2": demo(pre_tokenizer=sequence(split(QWEN2), BYTE_LEVEL), normalizer={"type": "NFC"}),
    "deepseek-v3": demo(pre_tokenizer=sequence(*map(split, DEEPSEEK), BYTE_LEVEL)),
    "gpt-4o": demo(pre_tokenizer=sequence(split(O200K), BYTE_LEVEL)),
    "minimax-m2": demo(pre_tokenizer=sequence(split(O200K), BYTE_LEVEL)),
    "laguna": demo(pre_tokenizer=sequence(LINES, split(QWEN2), BYTE_LEVEL)),
    "llama-bpe": demo(pre_tokenizer=sequence(split(LLAMA3), BYTE_LEVEL), model={**DEMO["model"], "ignore_merges": True}),
}


def write_gguf(path, add_fields):
    writer = gguf.GGUFWriter(path, "llama")
    add_fields(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def random_strings(seed=SEED):
    rng = random.Random(seed)
    return [random_string(rng) for _ in range(max(STRINGS // 4, 1))]


@pytest.mark.parametrize("pre", VARIANTS)
def test_byte_level(pre, tmp_path):
    package = tokenizers.Tokenizer.from_str(json.dumps(VARIANTS[pre]))
    vocab = package.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.get)
    assert [vocab[token] for token in tokens] == list(range(len(tokens)))
    special = {token["content"]: token["special"] for token in DEMO["added_tokens"]}

    def fields(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        kinds = {None: TYPE.NORMAL, True: TYPE.CONTROL, False: TYPE.USER_DEFINED}
        writer.add_token_types([kinds[special.get(token)] for token in tokens])
        writer.add_token_merges(DEMO["model"]["merges"])

    path = tmp_path / "m.gguf"
    write_gguf(path, fields)
    strings = random_strings()
    for parse_special in (True, False):
        package.encode_special_tokens = not parse_special
        flags = [] if parse_special else ["--no-parse-special"]
        for string, answer in zip(strings, nibble(path, strings, *flags), strict=True):
            ids = package.encode(string).ids
            assert answer == {"ids": ids, "decoded": package.decode(ids)}, string


@pytest.fixture(scope="module")
def trained():
    """A small SentencePiece model of the repository's own documents."""
    lines = [line for file in sorted((ROOT / "docs").glob("*.md")) for line in file.read_text().splitlines() if line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=900, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.99,
        user_defined_symbols=["<user>"], control_symbols=["<ctl>"], minloglevel=2,
        hard_vocab_limit=False,
    )
    return model.getvalue()


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece(prefix, trained, tmp_path):
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(trained)
    proto.normalizer_spec.add_dummy_prefix = prefix
    # SentencePiece makes unused tokens on its way and takes them apart at the end.
    for piece in proto.pieces[300:900:7]:
        piece.type = piece.UNUSED
    package = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def fields(writer):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([piece.piece for piece in proto.pieces])
        writer.add_token_scores([piece.score for piece in proto.pieces])
        writer.add_token_types([piece.type for piece in proto.pieces])
        writer.add_add_space_prefix(prefix)

    path = tmp_path / "m.gguf"
    write_gguf(path, fields)
    # After an added token ours puts a space again, as llama.cpp does; so none here but as plain text.
    strings = [s for s in random_strings() if "\0" not in s and "<user>" not in s] + ["<ctl> <s></s> <0x0A> <unk>"]
    answers = nibble(path, strings, "--no-parse-special", "--no-add-special")
    for string, answer in zip(strings, answers, strict=True):
        ids = package.encode(string)
        assert answer["ids"] == ids, string
        assert answer["decoded"] == package.decode(ids), string
    special = nibble(path, ["<ctl>", "a<user>"])
    control, user = package.piece_to_id("<ctl>"), package.piece_to_id("<user>")
    assert special[0]["ids"] == [package.bos_id(), control]
    assert special[1]["ids"] == [package.bos_id(), *package.encode("a"), user]
