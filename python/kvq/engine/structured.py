"""Answers that follow a JSON schema or a grammar: which tokens may come next (llguidance).

A grammar is compiled once and kept; every answer gets a copy of the compiled one.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvq.errors import ConfigError
from kvq.tokenizer import Tokenizer

#: Compiled grammars that are kept.
_KEPT = 64
#: Between the tokens of JSON. Unbounded, a small model may indent for ever.
_JSON_SPACE = r"[\x20\x0A]{0,16}"


class GrammarConstraint:
    """Where one answer stands in its grammar.

    Parameters
    ----------
    matcher : llguidance.LLMatcher
        Owned by this answer alone.
    vocab_size : int
        Length of the masks.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> np.ndarray:
        """Which tokens may come next, bool ``[V]``; the model's stop tokens where the answer may end.

        Raises
        ------
        ConfigError
            If following the grammar got too costly.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.zeros(self._vocab_size, bool)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        mask[: len(known)] = known
        return mask

    def advance(self, token: int) -> None:
        """Take the token that was drawn.

        Raises
        ------
        ConfigError
            If it is not allowed here.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def stopped(self) -> bool:
        """Whether the answer is complete and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"the grammar cannot be followed: {_first_line(self._matcher.get_error())}")


class Grammars:
    """Compiles grammars for one tokenizer.

    Parameters
    ----------
    tokenizer : Tokenizer
    vocab_size : int
        Ids that may be drawn.
    stop_ids : iterable of int
        Tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._stop_ids = sorted(set(stop_ids))
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._ll_tokenizer: Any = None

    def constraint(self, grammar: str) -> GrammarConstraint:
        """A constraint at the start of a grammar that one of the functions below made.

        Raises
        ------
        ConfigError
            If the grammar is not valid, or llguidance is not installed.
        """
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is None:
                matcher = self._compiled[grammar] = self._compile(grammar)
                if len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return GrammarConstraint(matcher.deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> Any:
        llguidance = _llguidance()
        if self._ll_tokenizer is None:
            wrapper = llguidance.TokenizerWrapper(
                _Vocabulary(self._tokenizer, self._vocab_size, self._stop_ids)
            )
            self._ll_tokenizer = llguidance.LLTokenizer(wrapper, eos_token=self._stop_ids)
        matcher = llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ConfigError(f"the schema or grammar is not valid: {_first_line(matcher.get_error())}")
        return matcher


class _Vocabulary:
    """A tokenizer as llguidance wants to see it: the bytes of every id, and which ids are markers."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise ConfigError("structured output needs a model with a stop token: its configuration has none")
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = stop_ids[0], None
        self.tokens = [tokenizer.token_bytes(index) for index in range(vocab_size)]
        self.special_token_ids = [index for index in range(vocab_size) if tokenizer.is_special(index)]

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def json_schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON that satisfies a schema."""
    grammar: str = _llguidance().LLMatcher.grammar_from_json_schema(json.dumps(guided(schema)))
    return grammar


def guided(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema with kvq's own ways of writing JSON, ready for llguidance."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return {**schema, "x-guidance": {"whitespace_pattern": _JSON_SPACE}}


def regex_grammar(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches whole (Rust's syntax)."""
    grammar: str = _llguidance().LLMatcher.grammar_from_regex(pattern)
    return grammar


def text_grammar(text: str) -> str:
    """A grammar in Lark's syntax as llguidance reads it, or in GBNF's (the EBNF with ``root ::=``).

    Raises
    ------
    ConfigError
        If a GBNF grammar cannot be read.
    """
    llguidance = _llguidance()
    if re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE):
        try:
            text = llguidance.gbnf_to_lark.gbnf_to_lark(text)
        except Exception as problem:  # the converter raises nothing narrower
            raise ConfigError(f"the grammar is not valid: {_first_line(str(problem))}") from None
    return lark_grammar(text)


def lark_grammar(text: str) -> str:
    """A grammar in Lark's syntax as llguidance reads it."""
    grammar: str = _llguidance().LLMatcher.grammar_from_lark(text)
    return grammar


def read_schema(schema: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A schema that may be given as JSON text.

    Raises
    ------
    ConfigError
        If it is no JSON object.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as problem:
            raise ConfigError(f"the schema is not valid JSON: {problem}") from None
    if not isinstance(schema, Mapping):
        raise ConfigError(f"the schema must be a JSON object, not {schema!r}")
    return schema


def _llguidance() -> Any:
    try:
        import llguidance
        import llguidance.gbnf_to_lark
    except ImportError:
        raise ConfigError(
            "structured output needs the package llguidance: pip install 'kvq[serve]'"
        ) from None
    return llguidance


def _first_line(message: str) -> str:
    """What went wrong, without the picture of where."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^|")]
    errors = [line for line in lines if line.startswith("error:")]
    return " ".join([*lines[:1], *errors[:1]])[:300]
