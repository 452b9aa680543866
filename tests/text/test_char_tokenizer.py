"""The character tokenizer: round trips, the ids of a conversation, and what it refuses."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxroll.config import TokenizerConfig
from jaxroll.errors import ConfigError, DataError
from jaxroll.protocols import Tokenizer
from jaxroll.records import Message
from jaxroll.text import tokenizers
from jaxroll.text.tokenizers import UNKNOWN, CharTokenizer

ALPHABET = string.ascii_lowercase + " \n+"


@given(st.text(alphabet=ALPHABET, max_size=200))
def test_decoding_gives_back_what_was_encoded(text: str) -> None:
    tokenizer = CharTokenizer(ALPHABET)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert all(4 <= i < tokenizer.vocab_size for i in ids)


@given(st.lists(st.integers(-5, 60), max_size=20))
def test_any_ids_can_be_decoded_and_only_characters_read_as_characters(ids: list[int]) -> None:
    tokenizer = CharTokenizer("abc")
    written = {4: "a", 5: "b", 6: "c", tokenizer.eos_id: ""}
    assert tokenizer.decode(ids) == "".join(written.get(i, UNKNOWN) for i in ids)


def test_padding_inside_an_answer_is_seen() -> None:
    tokenizer = CharTokenizer("hi")
    h, i = tokenizer.encode("hi")
    assert tokenizer.decode([h, tokenizer.pad_id, i]) != "hi"
    assert tokenizer.decode([h, tokenizer.turn_id, i]) != "hi"


@pytest.mark.parametrize(("alphabet", "size"), [("abcd", 8), ("abcde", 16), (string.ascii_lowercase, 32)])
def test_vocabulary_is_a_multiple_of_eight(alphabet: str, size: int) -> None:
    assert CharTokenizer(alphabet).vocab_size == size


def test_order_and_repetition_in_the_alphabet_change_nothing() -> None:
    assert CharTokenizer("cabba").encode("abc") == CharTokenizer("abc").encode("abc") == [4, 5, 6]


def user(text: str) -> Message:
    return Message("user", text)


A, B, C = 4, 5, 6
PAD, BOS, EOS, TURN = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("messages", "first", "ids"),
    [
        pytest.param((user("ab"),), True, [BOS, A, B, TURN], id="a question"),
        pytest.param((Message("system", "c"), user("ab")), True, [BOS, C, BOS, A, B, TURN], id="two in a row"),
        pytest.param(
            (user("a"), Message("assistant", "b"), user("c")), True, [BOS, A, TURN, B, EOS, C, TURN], id="an example"
        ),
        pytest.param((user("c"),), False, [C, TURN], id="the next turn"),
        pytest.param((Message("tool", "c"), user("a")), False, [C, BOS, A, TURN], id="the next turn, two messages"),
        pytest.param((), True, [BOS, TURN], id="nothing"),
    ],
)
def test_a_rendered_conversation_ends_at_the_assistants_turn(
    messages: tuple[Message, ...], first: bool, ids: list[int]
) -> None:
    assert CharTokenizer("abc").render(messages, first=first) == ids


def test_turns_joined_are_the_conversation_rendered_whole() -> None:
    tokenizer = CharTokenizer("abc")
    sampled = [*tokenizer.encode("b"), tokenizer.eos_id]
    joined = tokenizer.render((user("a"),)) + sampled + tokenizer.render((user("c"),), first=False)
    assert joined == tokenizer.render((user("a"), Message("assistant", "b"), user("c")))


def test_a_character_outside_the_alphabet_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match=r"'Z'.*alphabet"):
        CharTokenizer("abc").encode("aZb")


@pytest.mark.parametrize("alphabet", ["", "ab" + UNKNOWN])
def test_useless_alphabets_are_refused(alphabet: str) -> None:
    with pytest.raises(ConfigError):
        CharTokenizer(alphabet)


def test_build_follows_the_config() -> None:
    built = tokenizers.build(TokenizerConfig(kind="char"), "abc")
    assert isinstance(built, CharTokenizer)
    assert built.encode("c") == [6]
    described: Tokenizer = built
    assert (described.pad_id, described.eos_id, described.vocab_size) == (0, 2, 8)
    with pytest.raises(ConfigError, match=r"tokenizer\.path"):
        tokenizers.build(TokenizerConfig(kind="hf"), "abc")
