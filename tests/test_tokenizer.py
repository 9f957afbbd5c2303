"""Tokenizers built from GGUF vocabularies, decoding as a stream, and chat templates."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from kvq.errors import CheckpointError, ConfigError
from kvq.loader.gguf_tokenizer import build_tokenizer
from kvq.tokenizer import Tokenizer
from kvq.tokenizer.chat_template import ChatTemplate

PATH = Path("model.gguf")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["Ġt", "he", "Ġthe", "12", "123", "Ġhello", "'s"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "' s"]


def byte_level(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *BYTES, *WORDS, "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 4), 4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


#: Pieces with scores: a better score is merged first.
PIECES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "bc": -5.0, "ab": -6.0, "▁ab": -7.0, "abc": -8.0}


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(PIECES)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def build(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(build_tokenizer(metadata, PATH))


def spell(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token(index) for index in tokenizer.encode(text)]


# ---- vocabularies of GGUF ----------------------------------------------------------------------------
def test_pre_tokenizers_differ_in_digits() -> None:
    text = " the123"
    assert spell(build(byte_level("smollm")), text) == ["Ġthe", "1", "2", "3"]
    assert spell(build(byte_level("qwen2")), text) == ["Ġthe", "1", "2", "3"]
    assert spell(build(byte_level("llama-bpe")), text) == ["Ġthe", "123"]
    assert spell(build(byte_level("gpt-2")), text) == ["Ġthe", "123"]


def test_llama_3_takes_whole_words_of_the_vocabulary() -> None:
    assert spell(build(byte_level("llama-bpe")), " hello") == ["Ġhello"]
    assert spell(build(byte_level("gpt-2")), " hello") == ["Ġ", "he", "l", "l", "o"]


def test_qwen2_composes_characters() -> None:
    assert build(byte_level("qwen2")).encode("e\u0301") == build(byte_level("qwen2")).encode("é")
    assert build(byte_level("smollm")).encode("e\u0301") != build(byte_level("smollm")).encode("é")


def test_markers_are_single_tokens() -> None:
    tokenizer = build(byte_level())
    assert tokenizer.encode("<|im_start|>the<|im_end|><tool>") == [
        1,
        *(tokenizer.token_id(token) for token in ("t", "he")),
        2,
        tokenizer.vocab_size - 1,
    ]
    # Control tokens are no text; tokens of the user are.
    assert tokenizer.decode([1, 2, tokenizer.vocab_size - 1]) == "<tool>"
    assert tokenizer.decode([1, 2], skip_special_tokens=False) == "<|im_start|><|im_end|>"


def test_begin_token_where_the_file_asks_for_it() -> None:
    assert build(byte_level()).encode("t", add_special_tokens=True)[0] != 1
    assert build(byte_level(add_bos_token=True)).encode("t", add_special_tokens=True)[0] == 1
    assert build(byte_level(add_bos_token=True)).encode("t")[0] != 1
    assert build(sentencepiece()).encode("a", add_special_tokens=True)[0] == 1
    assert build(sentencepiece(add_bos_token=False)).encode("a", add_special_tokens=True)[0] != 1


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = build(sentencepiece())
    # "bc" has a better score than "ab", and "▁ab" cannot be made then.
    assert spell(tokenizer, "abc") == ["▁", "abc"]
    assert spell(tokenizer, "ab ab") == ["▁ab", "▁ab"]
    assert spell(tokenizer, "aé") == ["▁", "a", "<0xC3>", "<0xA9>"]
    assert spell(build(sentencepiece(add_space_prefix=False)), "ab") == ["ab"]


@pytest.mark.parametrize("metadata", [byte_level(), byte_level("llama-bpe"), sentencepiece()])
@pytest.mark.parametrize(
    "text", ["", "the cab", " leading", "tabs\tand\n\nlines  two", "é日本😀 ẞ", "1234567", "\x00\x7f", "a  b"]
)
def test_text_round_trips(metadata: dict[str, Any], text: str) -> None:
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_round_trips(text: str) -> None:
    for tokenizer in ROUND_TRIP:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


ROUND_TRIP = [build(byte_level()), build(byte_level("llama-bpe"))]


def test_vocabularies_that_cannot_be_used() -> None:
    for metadata, expected in (
        ({}, "tokenizer.ggml.tokens is missing"),
        ({**byte_level(), "tokenizer.ggml.model": "rwkv"}, "tokenizer of kind 'rwkv' is not supported"),
        (byte_level("tekken"), "pre-tokenizer 'tekken' is not supported"),
        (byte_level(merges=["q qqq"]), "the merges do not fit the vocabulary"),
        (byte_level(tokens=["a", "a"]), "holds 1 tokens twice"),
        (sentencepiece(scores=[1.0]), "tokenizer.ggml.scores is missing or of another length"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=expected):
            build_tokenizer(metadata, PATH)


# ---- decoding ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("metadata", [byte_level(), sentencepiece()])
def test_stream_is_what_the_library_decodes(metadata: dict[str, Any]) -> None:
    library = build_tokenizer(metadata, PATH)
    tokenizer = Tokenizer(library)
    text = "the é日本😀 123 \n ab"
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    parts = [stream.put(index) for index in ids]
    assert "".join(parts) + stream.flush() == library.decode(ids) == text
    # Characters come whole: never before their last byte, and never as U+FFFD.
    assert not any("�" in part for part in parts)
    assert "" in parts


@pytest.mark.parametrize("seed", range(20))
def test_random_ids_decode_as_the_library_does(seed: int) -> None:
    library = build_tokenizer(byte_level(), PATH)
    tokenizer = Tokenizer(library)
    ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=200)
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    tokenizer = build(byte_level())
    ids = tokenizer.encode("a😀")[:-1]
    stream = tokenizer.stream()
    assert "".join(stream.put(index) for index in ids) == "a"
    assert stream.flush() == "�"
    assert stream.flush() == ""


def test_ids_that_stand_for_nothing() -> None:
    tokenizer = build(byte_level())
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.token(10**6) is None and tokenizer.token_id("nothing") is None


def test_a_step_costs_the_same_after_a_long_text() -> None:
    tokenizer = build(byte_level())
    ids = tokenizer.encode(" the 123 é" * 40)

    def seconds(rounds: int) -> float:
        stream = tokenizer.stream()
        for _ in range(rounds):
            for index in ids:
                stream.put(index)
        start = time.perf_counter()
        for _ in range(20):
            for index in ids:
                stream.put(index)
        return time.perf_counter() - start

    seconds(1)
    assert min(seconds(200) for _ in range(3)) < 4 * min(seconds(0) for _ in range(3))


def test_tokenizers_whose_tokens_are_not_bytes() -> None:
    library = tokenizers.Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="decodes by WordPiece"):
        Tokenizer(library)


def test_directories_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json: no such file: run kvq gen_config"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        Tokenizer.from_dir(tmp_path)
    build_tokenizer(byte_level(), PATH).save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(ConfigError, match="no chat template: run kvq gen_config with --conv-template"):
        tokenizer.apply_chat_template([])


# ---- templates ---------------------------------------------------------------------------------------
def render(text: str, **variables: Any) -> str:
    return ChatTemplate(text, "<s>", "</s>").render([{"role": "user", "content": "Hi"}], **variables)


def test_what_templates_may_use() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"
    assert render("{% if tools is not none %}T{% endif %}{{ documents is none }}") == "True"
    assert render("{{ tools | tojson }}", tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% generation %}{{ 1 }}{% endgeneration %}") == "1"
    # Lines that hold only a tag leave nothing behind.
    assert render("  {% if true %}\nyes\n  {% endif %}\nend") == "yes\nend"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_content_in_parts_is_joined() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    template = ChatTemplate("{{ messages[0]['content'] + '!' }}")
    assert template.render([{"role": "user", "content": parts}]) == "Hello there!"


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_templates_that_fail_are_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        render(text)
    assert "chat template refuses" in str(error.value) and "\n" not in str(error.value)
