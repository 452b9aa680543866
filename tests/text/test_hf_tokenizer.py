"""Tokenizers read from a Hugging Face folder: round trips, chat templates, and folders that are not right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxroll.config import Config
from jaxroll.errors import ConfigError, DataError
from jaxroll.records import Message
from jaxroll.rollout.episode import sampling_params
from jaxroll.text.tokenizers import HFTokenizer, end_ids

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The shape of the ChatML templates that most open models use.
CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

MakeFolder = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE trained here on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat", "Spell this word backward: sun"] * 10, trainer)
    return tokenizer.to_str()


@pytest.fixture
def make_folder(tmp_path: Path, tokenizer_json: str) -> MakeFolder:
    def make(template: str | None = None, **settings: Any) -> Path:
        (tmp_path / "tokenizer.json").write_text(tokenizer_json)
        settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, **settings}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return make


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, tokenizer_json: str) -> HFTokenizer:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return HFTokenizer(folder)


@given(text=st.text(max_size=80))
def test_decoding_gives_back_what_was_encoded(plain: HFTokenizer, text: str) -> None:
    if not any(token in text for token in SPECIAL):
        ids = plain.encode(text)
        assert plain.decode(ids) == plain.decode([*ids, plain.eos_id]) == text


def test_ids_of_the_special_tokens(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder())
    assert (tokenizer.eos_id, tokenizer.pad_id) == (2, 0)
    assert tokenizer.vocab_size == Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json")).get_vocab_size()
    assert "<|im_start|>" in tokenizer.decode([1]), "a special token inside an answer must be seen"


def test_ids_with_holes_still_index_the_embedding_table(make_folder: MakeFolder) -> None:
    folder = make_folder()
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["x"] = 999
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = HFTokenizer(folder)
    assert tokenizer.encode("x") == [999]
    assert tokenizer.vocab_size == 1000


def test_without_a_template_the_format_is_plain(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder())
    text = tokenizer.decode(tokenizer.render((Message("user", "sun"),)))
    assert text == "User: sun\nAssistant:"


@pytest.mark.parametrize("kept_in", ["file", "settings", "named"])
def test_a_chat_template_is_found_wherever_models_keep_it(make_folder: MakeFolder, kept_in: str) -> None:
    if kept_in == "file":
        folder = make_folder(CHATML)
    elif kept_in == "settings":
        folder = make_folder(chat_template=CHATML)
    else:
        folder = make_folder(chat_template=[{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}])
    tokenizer = HFTokenizer(folder)
    ids = tokenizer.render((Message("user", "sun"),))
    assert tokenizer.encode("<|im_start|>user\nsun<|im_end|>\n<|im_start|>assistant\n") == ids
    assert ids.count(tokenizer.eos_id) == 1, "special tokens of the template are single ids"


def test_later_turns_continue_the_conversation_as_the_template_would(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder(CHATML))
    question, answer, remark = Message("user", "sun"), Message("assistant", "nus"), Message("user", "again")
    sampled = [*tokenizer.encode("nus"), tokenizer.eos_id]
    joined = tokenizer.render((question,)) + sampled + tokenizer.render((remark,), first=False)
    assert joined == tokenizer.render((question, answer, remark))


def test_a_template_cannot_reach_into_python(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder("{{ ''.__class__.__mro__[1].__subclasses__() }}"))
    with pytest.raises(DataError, match="refused"):
        tokenizer.render((Message("user", "x"),))


def test_a_template_that_forbids_a_conversation_says_why(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder("{{ raise_exception('users only') }}"))
    with pytest.raises(DataError, match="users only"):
        tokenizer.render((Message("system", "x"),))


def test_the_date_in_a_template_does_not_change(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder("{{ strftime_now('%Y-%m-%d') }}"))
    assert tokenizer.decode(tokenizer.render((Message("user", "x"),))) == "2025-01-01"


def test_a_template_without_jinja2_says_what_to_install(
    make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"jaxroll\[hf\]"):
        HFTokenizer(make_folder(CHATML))
    (make_folder() / "chat_template.jinja").unlink()
    HFTokenizer(make_folder())  # no template, no need


def test_eos_may_be_defined_in_the_generation_config(make_folder: MakeFolder) -> None:
    folder = make_folder(eos_token=None)
    with pytest.raises(ConfigError, match="ends a sequence"):
        HFTokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert HFTokenizer(folder).eos_id == 1


def test_an_answer_ends_with_any_end_of_the_generation_config_eos_first(make_folder: MakeFolder) -> None:
    folder = make_folder()
    named = HFTokenizer(folder)
    assert end_ids(named) == (named.eos_id,)
    others = [one for one in range(8) if one != named.eos_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [others[0], named.eos_id, others[1]]}))
    tokenizer = HFTokenizer(folder)
    assert (tokenizer.eos_id, end_ids(tokenizer)) == (named.eos_id, (named.eos_id, *others[:2]))
    assert sampling_params(Config(), tokenizer).stop_tokens == end_ids(tokenizer)
    assert sampling_params(Config(), tokenizer, 0.0).stop_tokens == end_ids(tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [named.eos_id, *others]}))
    assert end_ids(HFTokenizer(folder)) == (named.eos_id, *others[:3]), "an engine has room for four"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("chat_template.jinja", "{% if %}"),
    ],
)
def test_a_broken_folder_is_a_config_error_that_names_the_file(
    make_folder: MakeFolder, name: str, text: str | None
) -> None:
    folder = make_folder()
    (folder / name).unlink() if text is None else (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer\.json|" + name):
        HFTokenizer(folder)


@pytest.mark.parametrize(
    "content", ["jaxroll-earlier-answer", "a jaxroll-earlier-answer b", "jaxroll-earlier-answer-0-"]
)
def test_a_message_that_holds_the_mark_of_the_cut_keeps_its_header(make_folder: MakeFolder, content: str) -> None:
    tokenizer = HFTokenizer(make_folder(CHATML))
    ids = tokenizer.render((Message("user", content),), first=False)
    assert ids == tokenizer.encode(f"\n<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n")


# The shape of templates with tools and thinking: tools before the first message, an empty thought when it is off.
TOOLS_AND_THOUGHT = (
    """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}"""
    + CHATML.replace("message.role +", "message.role + ('!' if tools and message.role == 'tool' else '') +")
    + """{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"""
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_arguments_of_the_template_reach_every_turn(make_folder: MakeFolder) -> None:
    folder = make_folder(TOOLS_AND_THOUGHT)
    off, on = HFTokenizer(folder, {"enable_thinking": False}), HFTokenizer(folder)
    sun = (Message("user", "sun"),)
    for first in (True, False):
        assert off.render(sun, first=first) == on.render(sun, first=first) + on.encode("<think></think>")


def test_tools_are_shown_once_and_turns_continue_exactly(make_folder: MakeFolder) -> None:
    tokenizer = HFTokenizer(make_folder(TOOLS_AND_THOUGHT))
    opening = (Message("system", "terse"), Message("user", "cat"), Message("assistant", "tac"), Message("user", "sun"))
    answer, remark = Message("assistant", "nus"), Message("tool", "again")
    first = tokenizer.render(opening, tools=[TOOL])
    assert tokenizer.decode(first).count('"name": "add"') == 1
    sampled = [*tokenizer.encode("nus"), tokenizer.eos_id]
    joined = first + sampled + tokenizer.render((remark,), first=False, tools=[TOOL])
    assert joined == tokenizer.render((*opening, answer, remark), tools=[TOOL])


@pytest.mark.parametrize("template", [CHATML, None])
def test_tools_that_no_template_shows_are_refused(make_folder: MakeFolder, template: str | None) -> None:
    tokenizer = HFTokenizer(make_folder(template))
    with pytest.raises(ConfigError, match=r"task\.tools.*add.*tools"):
        tokenizer.render((Message("user", "x"),), tools=[TOOL])


def test_arguments_that_no_template_reads_are_refused(make_folder: MakeFolder) -> None:
    with pytest.raises(ConfigError, match=r"enable_thought.*Did you mean 'enable_thinking'"):
        HFTokenizer(make_folder(TOOLS_AND_THOUGHT), {"enable_thought": False})
    dated = "{%- if not date_string is defined %}{%- set date_string = 'today' %}{%- endif %}{{ date_string }}"
    tokenizer = HFTokenizer(make_folder(dated), {"date_string": "1 May"})
    assert tokenizer.decode(tokenizer.render((Message("user", "x"),))) == "1 May"
    (tokenizer.folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        HFTokenizer(tokenizer.folder, {"enable_thinking": False})
