"""Grammars over kvq's own tokenizers: what may come next, where an answer may end, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq.engine import structured
from kvq.engine.structured import GrammarConstraint, Grammars
from kvq.errors import ConfigError
from kvq.tokenizer import Tokenizer
from tiny_llama import byte_tokenizer

EOS = 2
VOCAB = 264

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, [EOS])


def follow(constraint: GrammarConstraint, choose: Any, limit: int = 200) -> list[int]:
    """Draw allowed tokens until the answer ends; the end token is left out."""
    tokens: list[int] = []
    while not constraint.stopped and len(tokens) < limit:
        allowed = np.flatnonzero(constraint.allowed())
        assert len(allowed), "a grammar never leaves a model without a token"
        token = int(choose(allowed))
        constraint.advance(token)
        if token == EOS:
            break
        tokens.append(token)
    return tokens


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_whatever_is_drawn_satisfies_the_schema(seed: int) -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    grammars = _shared(tokenizer)
    rng = np.random.default_rng(seed)
    constraint = grammars.constraint(structured.json_schema_grammar(SCHEMA))
    tokens = follow(constraint, lambda allowed: rng.choice(allowed), 300)
    if constraint.stopped:
        value = json.loads(tokenizer.decode(tokens))
        assert set(value) == {"name", "age"}
        assert isinstance(value["name"], str) and len(value["name"]) <= 8
        assert isinstance(value["age"], int)


_GRAMMARS: list[Grammars] = []


def _shared(tokenizer: Tokenizer) -> Grammars:
    if not _GRAMMARS:
        _GRAMMARS.append(Grammars(tokenizer, VOCAB, [EOS]))
    return _GRAMMARS[0]


def test_the_only_answer_is_forced_and_then_ended(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.constraint(structured.json_schema_grammar({"const": {"a": [1, "ü€"]}}))
    first = follow(constraint, lambda allowed: allowed[-1])
    assert json.loads(tokenizer.decode(first)) == {"a": [1, "ü€"]}
    assert constraint.stopped


def test_masks_cover_padding_and_forbid_markers(grammars: Grammars) -> None:
    mask = grammars.constraint(structured.regex_grammar("(.|\\n)*")).allowed()
    assert mask.shape == (VOCAB,) and mask.dtype == bool
    assert not mask[:2].any() and mask[EOS] and not mask[259:].any()
    assert mask[3:].sum() == 256 - 64 - 13  # bytes that can begin a character


def test_the_end_is_allowed_only_where_the_grammar_ends(tokenizer: Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.constraint(structured.regex_grammar("ab+"))
    assert not constraint.allowed()[EOS]
    for char in "ab":
        constraint.advance(tokenizer.encode(char)[0])
    assert constraint.allowed()[EOS] and not constraint.stopped
    with pytest.raises(ConfigError, match="cannot be followed"):
        constraint.advance(tokenizer.encode("x")[0])


def test_answers_do_not_share_their_place(tokenizer: Tokenizer, grammars: Grammars) -> None:
    grammar = structured.regex_grammar("ab")
    one, other = grammars.constraint(grammar), grammars.constraint(grammar)
    one.advance(tokenizer.encode("a")[0])
    assert np.flatnonzero(other.allowed()).tolist() == tokenizer.encode("a")
    assert np.flatnonzero(one.allowed()).tolist() == tokenizer.encode("b")


def test_tokens_that_cut_characters_and_keywords() -> None:
    """Byte-level BPE whose merges end inside a character and reach over the end of a literal."""
    base = byte_tokenizer()
    vocabulary = base.get_vocab()
    half = "".join(
        c for c in tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("€")[0][0]
    )
    for extra in (half[:2], "tr", "ue", '"}', '":'):
        vocabulary[extra] = len(vocabulary)
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")
    merged = tokenizers.Tokenizer(model)
    merged.pre_tokenizer, merged.decoder = base.pre_tokenizer, base.decoder
    merged.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(merged)
    grammars = Grammars(tokenizer, len(vocabulary), [EOS])
    schema = {"enum": ["€", True]}
    texts = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tokens = follow(grammars.constraint(structured.json_schema_grammar(schema)), rng.choice)
        texts.add(json.dumps(json.loads(tokenizer.decode(tokens)), ensure_ascii=False))
    assert texts == {'"€"', "true"}


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('start: "yes" | "no"', "no", "maybe"),
        ('root ::= "yes" | num\nnum ::= [0-9]+', "42", "no"),
    ],
    ids=["lark", "gbnf"],
)
def test_text_grammars(tokenizer: Tokenizer, grammars: Grammars, text: str, good: str, bad: str) -> None:
    grammar = structured.text_grammar(text)
    constraint = grammars.constraint(grammar)
    for token in tokenizer.encode(good):
        assert constraint.allowed()[token]
        constraint.advance(token)
    assert constraint.stopped or constraint.allowed()[EOS]
    constraint = grammars.constraint(grammar)
    assert not all(_advance(constraint, token) for token in tokenizer.encode(bad))


def _advance(constraint: GrammarConstraint, token: int) -> bool:
    allowed = bool(constraint.allowed()[token])
    if allowed:
        constraint.advance(token)
    return allowed


@pytest.mark.parametrize(
    "make",
    [
        lambda: structured.json_schema_grammar({"type": "strin"}),
        lambda: structured.json_schema_grammar({"$ref": "#/nope"}),
        lambda: structured.json_schema_grammar({"type": "string", "pattern": "(?=x)"}),
        lambda: structured.json_schema_grammar(False),
        lambda: structured.regex_grammar("a(b"),
        lambda: structured.text_grammar("start: nothing"),
        lambda: structured.text_grammar("root ::= ("),
        lambda: structured.text_grammar(""),
        lambda: structured.json_schema_grammar(structured.read_schema("{")),
        lambda: structured.json_schema_grammar(structured.read_schema("[]")),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(grammars: Grammars, make: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        grammars.constraint(make())
    assert re.fullmatch(r"[^\n]+ (is not valid|must be a JSON object)[^\n]*", str(caught.value))


def test_a_model_without_a_stop_token_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="stop token"):
        Grammars(tokenizer, VOCAB, []).constraint(structured.regex_grammar("a"))


@pytest.mark.slow
def test_the_demo_models_tokenizer(demo_gguf: Path, tmp_path: Path) -> None:
    """49k byte-level tokens: what greedy-longest tokens spell is valid, whatever merges they are."""
    from kvq.gen_config import gen_config

    gen_config(demo_gguf, "q4f16kv", output=tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [end])
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"city": {"enum": ["Zürich", "東京"]}},
        "required": ["city"],
    }
    schema["additionalProperties"] = False
    constraint = grammars.constraint(structured.json_schema_grammar(schema))
    tokens: list[int] = []
    while not constraint.stopped:
        allowed = np.flatnonzero(constraint.allowed())
        token = int(max(allowed, key=lambda index: len(tokenizer.token_bytes(int(index)))))
        constraint.advance(token)
        tokens.append(token)
        assert len(tokens) < 100
    assert json.loads(tokenizer.decode(tokens))["city"] in ("Zürich", "東京")
