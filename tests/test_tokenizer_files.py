"""Tokenizers of checkpoints without ``tokenizer.json``: SentencePiece and tiktoken files written by hand."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from checkpoints import edit_json, write_tiny_llama
from kvq.errors import KvqError
from kvq.gen_config import gen_config
from kvq.loader.tokenizer_files import build_from_directory
from kvq.tokenizer import StreamDecoder, Tokenizer
from kvq.tokenizer.chat_template import ChatTemplate
from kvq.tokenizer.conv_templates import CONV_TEMPLATES
from kvq.tokenizer.stream import TokenBytes

TEXTS = ["the cab", "日本語 é😀👩‍👩‍👧 ẞ", "a  b\n\n\tc", "12345 don't", " x"]


# ---- SentencePiece ---------------------------------------------------------------------------------
def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protocol buffer."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value % 2**64)


SPACED = [
    "\u2581",
    "a",
    "b",
    "c",
    "t",
    "h",
    "e",
    "bc",
    "ab",
    "\u2581ab",
    "th",
    "the",
    "\u2581the",
    "\u2581cab",
    "cab",
]


def sentencepiece(kind: int, collapse: bool = False) -> bytes:
    """A model of the pieces above and all bytes; an earlier piece has a better score."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{i:02X}>", 0.0, 6) for i in range(256)]
    pieces += [(piece, -1.0 - i / 4, 1) for i, piece in enumerate(SPACED)]
    data = b"".join(field(1, field(1, p.encode()) + field(2, s) + field(3, t)) for p, s, t in pieces)
    trainer = field(3, kind) + field(40, 0) + field(41, 1) + field(42, 2) + field(43, -1)
    return data + field(2, trainer) + field(3, field(1, b"identity") + field(3, 1) + field(4, int(collapse)))


def build(directory: Path, name: str, data: bytes, settings: dict[str, Any] | None = None) -> RawTokenizer:
    (directory / name).write_bytes(data)
    return build_from_directory(directory, settings or {})


def segment(text: str) -> list[str]:
    """The best segmentation by the sum of scores, found by trying all."""
    scores = {piece: -1.0 - i / 4 for i, piece in enumerate(SPACED)}
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        best.append(
            max(
                (best[start][0] + scores[text[start:end]], [*best[start][1], text[start:end]])
                for start in range(end)
                if text[start:end] in scores
            )
        )
    return best[-1][1]


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "tokenizer.model", sentencepiece(2))
    assert tokenizer.encode("abc", add_special_tokens=False).tokens == ["\u2581", "a", "bc"]
    assert tokenizer.encode("the ab", add_special_tokens=False).tokens == ["\u2581the", "\u2581ab"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["\u2581", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("ab").tokens[0] == "<s>"


@pytest.mark.parametrize("text", ["the cab", "abcab", "cabbc the"])
def test_sentencepiece_seeks_the_best_segmentation(tmp_path: Path, text: str) -> None:
    tokenizer = build(tmp_path, "tokenizer.model", sentencepiece(1))
    expected = segment("\u2581" + text.replace(" ", "\u2581"))
    assert tokenizer.encode(text, add_special_tokens=False).tokens == expected


def test_spaces_that_the_model_collapses(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "tokenizer.model", sentencepiece(2, collapse=True))
    assert tokenizer.encode("  the   ab ").ids == tokenizer.encode("the ab").ids


def test_models_of_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvqError, match=r"tokenizer\.model: SentencePiece models of words"):
        build(tmp_path, "tokenizer.model", sentencepiece(3))


@pytest.mark.parametrize("charsmap", [b"abc", b"\x04\x00\x00\x00abcd"])
def test_damaged_normalization(tmp_path: Path, charsmap: bytes) -> None:
    data = sentencepiece(1) + field(3, field(2, charsmap))
    with pytest.raises(KvqError, match="the normalization of the SentencePiece model is damaged"):
        build(tmp_path, "tokenizer.model", data)


# ---- tiktoken --------------------------------------------------------------------------------------
MADE = [b"th", b"the", b" the", b" c", b" ca", b"12", b"123", "日".encode(), b"never"]


def tiktoken(made: list[bytes] = MADE) -> bytes:
    tokens = [bytes([i]) for i in range(256)] + ["日".encode()[:2], *made]
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def test_tiktoken_of_llama_3(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "tokenizer.model", tiktoken())
    first = 256 + 1 + len(MADE)
    assert tokenizer.encode("<|eot_id|>", add_special_tokens=False).ids == [first + 9]
    assert tokenizer.encode("the").ids[0] == tokenizer.token_to_id("<|begin_of_text|>") == first
    assert tokenizer.encode(" the 1234 日", add_special_tokens=False).tokens == [
        "Ġthe",
        "Ġ",
        "123",
        "4",
        "Ġ",
        "æĹ¥",
    ]
    # no merge reaches it, but a whole word of the vocabulary is taken as it is
    assert tokenizer.encode("never", add_special_tokens=False).tokens == ["never"]
    assert tokenizer.get_vocab_size() == first + 256


def test_tiktoken_of_qwen(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, "qwen.tiktoken", tiktoken())
    assert tokenizer.encode("12<|im_end|>").tokens == ["1", "2", "<|im_end|>"]


def test_ranks_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(KvqError, match="a rank or one of the 256 bytes is missing"):
        build(tmp_path, "tokenizer.model", tiktoken().split(b"\n", 1)[1])


# ---- all of them -----------------------------------------------------------------------------------
FILES = {
    "spm": ("tokenizer.model", sentencepiece(2)),
    "unigram": ("tokenizer.model", sentencepiece(1)),
    "llama3": ("tokenizer.model", tiktoken()),
    "qwen": ("qwen.tiktoken", tiktoken()),
}


@pytest.mark.parametrize("kind", FILES)
def test_text_comes_in_whole_characters(tmp_path: Path, kind: str) -> None:
    raw = build(tmp_path, *FILES[kind])
    tokenizer = Tokenizer(raw)
    for text in TEXTS:
        ids, decoder = tokenizer.encode(text), StreamDecoder(TokenBytes(raw))
        pieces = [decoder.put(index) for index in ids]
        assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert len(ids) > len(text) or "日" not in text  # characters of several tokens are among them


def test_tokens_that_the_configuration_adds(tmp_path: Path) -> None:
    size = 256 + 3 + len(SPACED)
    added = {
        str(size): {"content": "<|im_start|>", "special": True},
        "1": {"content": "<s>", "special": True},
    }
    tokenizer = build(tmp_path, "tokenizer.model", sentencepiece(2), {"added_tokens_decoder": added})
    assert tokenizer.token_to_id("<|im_start|>") == size
    with pytest.raises(KvqError, match="has the id 999, behind the vocabulary comes"):
        build(
            tmp_path,
            "tokenizer.model",
            sentencepiece(2),
            {"added_tokens_decoder": {"999": {"content": "x!"}}},
        )
    with pytest.raises(KvqError, match="added_tokens_decoder makes no sense"):
        build(tmp_path, "tokenizer.model", sentencepiece(2), {"added_tokens_decoder": {"x": 1}})


def test_gen_config_writes_the_tokenizer_that_it_made(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "in")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(sentencepiece(2))
    edit_json(path / "tokenizer_config.json", bos_token="<s>", eos_token="</s>", chat_template=None)
    (path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    config = gen_config(path, "q4f16_1", tmp_path / "out")
    assert config.stop_token_ids[:2] == [2, 1] and config.conv_template == "checkpoint"
    tokenizer = Tokenizer.from_dir(tmp_path / "out")
    assert tokenizer.decode(tokenizer.encode("the cab é")) == "the cab é"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["spm", "llama3"]))
def test_damaged_files(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    name, content = FILES[kind]
    damaged = bytearray(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        build(tmp_path, name, bytes(damaged))
    except KvqError as error:
        assert "\n" not in str(error)


# ---- templates for checkpoints without one -----------------------------------------------------------
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Why?"},
]
RENDERED = {
    "mistral": "<s>[INST] Be brief.\n\nHi [/INST] Hello</s>[INST] Why? [/INST]",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
    "<start_of_turn>model\nHello<end_of_turn>\n<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    "phi-3": "<s><|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n"
    "<|user|>\nWhy?<|end|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", RENDERED)
def test_built_in_templates(name: str) -> None:
    assert ChatTemplate(CONV_TEMPLATES[name], "<s>", "</s>").render(CONVERSATION) == RENDERED[name]
