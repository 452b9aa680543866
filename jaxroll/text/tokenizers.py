"""The tokenizer that a config names, with its chat format: of a Hugging Face folder, or of a task's characters.

In both kinds, `decode` drops the end-of-sequence token and shows all other tokens. If a model samples padding or
another special token within an answer, the text shows it, so that the answer is scored as wrong.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from jaxroll import disk
from jaxroll.config import TokenizerConfig
from jaxroll.errors import ConfigError, DataError, JaxRollError, one_line
from jaxroll.protocols import Tokenizer
from jaxroll.records import Message
from jaxroll.run_paths import RunPaths

# --- Tokenizers of local Hugging Face folders: tokenizer.json, tokenizer_config.json, chat_template.jinja

_TOKENIZER_LIMIT_BYTES = 128 << 20  # the largest known vocabularies take about 35 MB
_MAX_VOCABULARY = 1 << 24
_AGAIN = "Copy the file again from the model."
MOST_ENDS = 4  # stop tokens of a request, of an engine by default


def end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer: `eos_id`, then others of generation_config.json, `MOST_ENDS` at most."""
    return tuple(dict.fromkeys([tokenizer.eos_id, *getattr(tokenizer, "other_ends", ())]))[:MOST_ENDS]


class HFTokenizer:
    """The tokenizer of `folder`, with its chat template if it has one. Nothing is downloaded.

    `template_args` are variables of the chat template; ConfigError for one that the template does not read.

    `eos_id` comes from tokenizer_config.json (eos_token) or else from generation_config.json. If the latter lists
    several tokens, it is the one that the chat template writes after an answer (Gemma's end of a turn is not its
    eos_token); the others are `other_ends`. `pad_id` comes from pad_token; the default is `eos_id`, because no mask is
    derived from it.
    """

    def __init__(self, folder: str | Path, template_args: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        if not str(folder):
            reason = "tokenizer.kind='hf' needs a folder"
            raise ConfigError("tokenizer.path", "", reason, "Set it to a local folder that holds tokenizer.json.")
        self._tokenizer = _load(self.folder / "tokenizer.json")
        self._settings = _read_json(self.folder / "tokenizer_config.json")
        # Not the number of entries: ids may have gaps, and the largest id determines the size of the embedding.
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 1 <= self.vocab_size <= _MAX_VOCABULARY:
            reason = f"its largest token id is {self.vocab_size - 1}; between 0 and {_MAX_VOCABULARY - 1} are possible"
            raise ConfigError("tokenizer.path", str(folder), reason, "Copy tokenizer.json again from the model.")
        self._format = self._chat_format(template_args or {})
        self.eos_id, ends = self._ends()
        self.other_ends = tuple(one for one in ends if one != self.eos_id)
        pad_id = self._token_id(self._settings.get("pad_token"))
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self._eos_token: str = self._tokenizer.id_to_token(self.eos_id)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without added special tokens. DataError for text that cannot be tokenized."""
        with _typed(lambda why: DataError(f"{one_line(repr(text), 80)} cannot be tokenized: {why}")):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without eos; other special tokens appear as text."""
        with _typed(lambda why: DataError(f"{len(ids)} token ids cannot be decoded: {why}")):
            return self._tokenizer.decode([i for i in ids if i != self.eos_id], skip_special_tokens=False)

    def render(
        self, messages: tuple[Message, ...], *, first: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of `messages` in the model's chat format, ending at the start of the assistant's turn.

        ConfigError for `tools` that the format does not show.
        """
        if first:
            return self.encode(self._format(messages, tools))
        return self.encode(continuation(self._format, messages, self._eos_token, tools))

    def conversation(self, messages: tuple[Message, ...]) -> list[int]:
        """Ids of a whole conversation in the model's chat format, without the start of another turn."""
        return self.encode(self._format(messages, (), whole=True))

    @property
    def has_template(self) -> bool:
        """True if the folder has a chat template."""
        return self._format is not plain_format

    def _ends(self) -> tuple[int, list[int]]:
        """The token that ends an answer, and those of generation_config.json, it among them or not."""
        generation = _read_json(self.folder / "generation_config.json").get("eos_token_id")
        listed = generation if isinstance(generation, list) else [generation]
        ends = [one for one in listed if isinstance(one, int) and 0 <= one < self.vocab_size]
        if len(ends) > 1 and (turn := self._end_of_turn(ends)) is not None:
            return turn, ends
        named = self._token_id(self._settings.get("eos_token"))
        if named is not None:
            return named, ends
        if ends and ends[0] == listed[0]:
            return ends[0], ends
        reason = "it does not define the token that ends a sequence"
        raise ConfigError("tokenizer.path", str(self.folder), reason, "Name it as eos_token in tokenizer_config.json.")

    def _end_of_turn(self, ends: list[int]) -> int | None:
        """The one of `ends` that the chat template writes after an answer; None if it writes none of them."""
        try:
            after = continuation(self._format, (Message("user", "?"),), "")
        except DataError:  # the template refuses such a conversation, or shows no earlier answers
            return None
        texts = {one: self._tokenizer.id_to_token(one) for one in ends}
        return next((one for one, text in texts.items() if text and after.startswith(text)), None)

    def _token_id(self, token: Any) -> int | None:
        """The id of a token in the notation of tokenizer_config.json: a string, or an object with its content."""
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    def _chat_format(self, template_args: Mapping[str, Any]) -> ChatFormat:
        path = self.folder / "chat_template.jinja"
        if path.exists():
            with _reading(path):
                source: Any = disk.read_text(path)
        else:
            path, source = self.folder / "tokenizer_config.json", self._settings.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = [entry for entry in source if isinstance(entry, dict)]
            source = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
        if not source and template_args:
            remedy = "Leave them out, or add chat_template.jinja to tokenizer.path."
            raise ConfigError("tokenizer.template_args", dict(template_args), "the folder has no chat template", remedy)
        if not source:
            return plain_format
        if not isinstance(source, str):
            raise ConfigError("tokenizer.path", str(path), "its chat_template is not text", "Write it as one string.")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: self._token_text(name) for name in names if self._token_text(name)}
        return jinja_format(source, special, str(path), template_args)

    def _token_text(self, name: str) -> str:
        token = self._settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        return text if isinstance(text, str) else ""


def _load(path: Path) -> Any:
    if not path.exists():
        remedy = "Point it to a local folder of a Hugging Face model."
        raise ConfigError("tokenizer.path", str(path.parent), "there is no tokenizer.json in it", remedy)
    try:
        import tokenizers
    except ImportError as error:
        reason = "the package tokenizers is not installed"
        raise ConfigError("tokenizer.kind", "hf", reason, "pip install tokenizers.") from error
    with _reading(path):
        text = disk.read_text(path, _TOKENIZER_LIMIT_BYTES)
    with _typed(lambda why: ConfigError("tokenizer.path", str(path), f"it cannot be read: {why}", _AGAIN)):
        made = tokenizers.Tokenizer.from_str(text)
    # A file may define both for a training script's batches; prompts must be neither truncated nor padded here.
    made.no_truncation()
    made.no_padding()
    return made


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file. ConfigError when it is not an object."""
    if not path.exists():
        return {}
    with _reading(path):
        found = disk.read_json(path)
    if not isinstance(found, dict):
        raise ConfigError("tokenizer.path", str(path), "it is not a JSON object", _AGAIN)
    return found


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DataError) as error:
        raise ConfigError("tokenizer.path", str(path), f"it cannot be read: {error}", _AGAIN) from error


@contextlib.contextmanager
def _typed(made: Callable[[str], JaxRollError]) -> Iterator[None]:
    """Convert errors of the tokenizers library by `made`."""
    # The library raises bare Exceptions; a panic of its Rust code is a BaseException of type PanicException.
    try:
        yield
    except Exception as error:
        raise made(one_line(str(error), 300)) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise made(one_line(str(error), 300)) from error


# --- The tokenizer that a config names

__all__ = ["CharTokenizer", "HFTokenizer", "build", "note", "of_run"]

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_VOCAB_MULTIPLE = 8  # so that the embedding can be sharded over small meshes


class CharTokenizer:
    """Tokenizer with one token per character of `alphabet`, after pad 0, bos 1, eos 2 and turn 3 (assistant's turn).

    `vocab_size` is rounded up to a multiple of 8; unused ids decode to the replacement character.
    """

    pad_id = 0
    bos_id = 1
    eos_id = 2
    turn_id = 3
    _first_char_id = 4

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise ConfigError("tokenizer.kind", "char", "the alphabet is empty", "Give the characters it must encode.")
        if UNKNOWN in alphabet:
            reason = f"{UNKNOWN!r} is reserved for ids without a character"
            raise ConfigError("tokenizer.kind", "char", reason, "Leave it out of the alphabet.")
        self.alphabet = "".join(sorted(set(alphabet)))
        self._id_of = {char: self._first_char_id + i for i, char in enumerate(self.alphabet)}
        used = self._first_char_id + len(self.alphabet)
        self.vocab_size = -(-used // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        # One entry per id; eos decodes to "", every other special or unused id to the replacement character.
        self._text_of = [UNKNOWN] * self.vocab_size
        self._text_of[self.eos_id] = ""
        self._text_of[self._first_char_id : used] = self.alphabet

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens. DataError for a character outside the alphabet."""
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise DataError(
                f"{text[:80]!r} holds {error.args[0]!r}, which is not in the alphabet {self.alphabet!r}; "
                "use a prompt form whose characters the task declares, or tokenizer.kind='hf'"
            ) from error

    def decode(self, ids: list[int]) -> str:
        """The text of `ids` without eos; any other id without a character becomes the replacement character."""
        size = self.vocab_size
        return "".join([self._text_of[i] if 0 <= i < size else UNKNOWN for i in ids])

    def render(
        self, messages: tuple[Message, ...], *, first: bool = True, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of `messages`, ending at the start of the assistant's turn. ConfigError for `tools`.

        A conversation begins with bos, which also separates two consecutive messages that are not the assistant's.
        `turn` begins the assistant's message and eos ends it: bos question turn answer eos question turn.
        """
        if tools:
            raise ConfigError("tokenizer.kind", "char", "it has no chat template that shows tools", "Set it to 'hf'.")
        ids = [self.bos_id] if first else []
        unanswered = False
        for message in messages:
            if message.role == "assistant":
                ids += [self.turn_id, *self.encode(message.content), self.eos_id]
            else:
                ids += [self.bos_id] if unanswered else []
                ids += self.encode(message.content)
            unanswered = message.role != "assistant"
        ids.append(self.turn_id)
        return ids


def note(run_dir: Path, tokenizer: Tokenizer) -> None:
    """Write the alphabet of a `char` tokenizer, which the config does not contain, into the run's folder."""
    if isinstance(tokenizer, CharTokenizer):
        disk.replace_text(RunPaths(run_dir).alphabet, json.dumps(tokenizer.alphabet) + "\n")


def of_run(run_dir: Path, cfg: TokenizerConfig) -> Tokenizer | None:
    """The tokenizer of a run, without its task; None when its folder has no alphabet (yet)."""
    if cfg.kind != "char":
        return build(cfg, "")
    path = RunPaths(run_dir).alphabet
    try:
        alphabet = disk.read_json(path)
    except FileNotFoundError:
        return None
    except DataError as error:
        raise ConfigError("RUN", str(run_dir), str(error), "Restore the file from a copy.") from error
    if not isinstance(alphabet, str):
        raise ConfigError("RUN", str(run_dir), f"{path.name} is not a string", "Restore the file from a copy.")
    return CharTokenizer(alphabet)


def arguments(cfg: TokenizerConfig, alphabet: str) -> dict[str, str]:
    """The arguments that build a tokenizer again without the task (see `weights.tokenizer`)."""
    return {"kind": cfg.kind, "path": cfg.path, "alphabet": alphabet}


def build(cfg: TokenizerConfig, alphabet: str) -> Tokenizer:
    """The tokenizer that `cfg` names; only kind 'char' uses `alphabet` (all characters that the task can produce)."""
    if cfg.kind == "char":
        return CharTokenizer(alphabet)
    if cfg.kind == "hf":
        return HFTokenizer(cfg.path, cfg.template_args)
    raise ConfigError("tokenizer.kind", cfg.kind, "there is no such kind", "Use 'char' or 'hf'.")


_PROBE = "The answer is 3.14: naïve λ-terms, 東京 🙂\n\tdef f(x): return x**2  # <|end|>"


def check_draft(folder: str, text: Tokenizer) -> None:
    """Raise ConfigError if the tokenizer.json of the draft model in `folder` has other tokens than `text`.

    Without one, or with a tokenizer of characters, nothing is checked. An empty `folder` is no draft model.
    """
    if not folder or not isinstance(text, HFTokenizer) or not (path := Path(folder) / "tokenizer.json").is_file():
        return
    with contextlib.suppress(DataError):  # `text` cannot encode everything
        with _typed(DataError):
            theirs = _load(path).encode(_PROBE, add_special_tokens=False).ids
        if theirs != text.encode(_PROBE):
            reason = "its tokenizer has other tokens, so none of its drafts would be right"
            raise ConfigError("sampler.draft_model", folder, reason, "Use a smaller model of the same family.")


# --- conversations as tokens, as an episode with the same messages would contain them


def runs(
    text: Tokenizer, first: tuple[Message, ...], worked: tuple[Message, ...], tools: Sequence[Mapping[str, Any]] = ()
) -> list[tuple[list[int], bool]]:
    """The token runs of a conversation in order, each with True if it is the assistant's.

    The conversation begins with `first`, and the model is shown `tools`; `worked` are the assistant's answers (each
    followed by eos) and the messages between them.
    """
    found: list[tuple[list[int], bool]] = []
    shown, opening = list(first), True
    for message in worked:
        if message.role != "assistant":
            shown.append(message)
            continue
        found.append((text.render(tuple(shown), first=opening, tools=tools), False))
        found.append(([*text.encode(message.content), text.eos_id], True))
        shown, opening = [], False
    return found


# --- Chat templates: the text of messages in the format that a Hugging Face model was trained on
#
# A template is Jinja source in the model's folder. It runs in Jinja's sandbox. Without a template a plain format is
# used, which no checkpoint was trained on but every base model can continue.

Tools = Sequence[Mapping[str, Any]]


class ChatFormat(Protocol):
    """Renders messages and tools, with a generation prompt at the end unless the conversation is `whole`."""

    def __call__(self, messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str: ...


# Placeholder of an earlier exchange when only the text after it is needed; no template produces it by itself. Messages
# that contain it, such as a dump of this file, get another one.
_EARLIER_QUESTION = "jaxroll-earlier-question"
_EARLIER_ANSWER = "jaxroll-earlier-answer"


def plain_format(messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str:
    """`Role: content` lines, ending with `Assistant:` unless they are `whole`; the default without a chat template.

    ConfigError for `tools`, which it cannot show.
    """
    if tools:
        reason = "the model's folder has no chat template that shows tools"
        remedy = "Use a model with such a template, or describe the tools in task.system_prompt."
        raise ConfigError("task.tools", _tool_names(tools), reason, remedy)
    return "".join(f"{message.role.capitalize()}: {message.content}\n" for message in messages) + "Assistant:" * (
        not whole
    )


def jinja_format(
    source: str, special_tokens: Mapping[str, str], where: str, template_args: Mapping[str, Any] | None = None
) -> ChatFormat:
    """The chat template `source` as a function of messages and tools, with a generation prompt at its end.

    `special_tokens` (eos_token, …) and `template_args` are its variables; `where` names its file in errors. ConfigError
    for a template that does not parse, exceeds `template_bounds` or reads no variable of the name of an argument. The
    function raises DataError for messages that the template refuses, and ConfigError for tools that it does not show.
    """
    try:
        import jinja2

        from jaxroll.text import template_bounds
    except ImportError as error:
        reason = "its chat template needs jinja2, which is not installed"
        remedy = "pip install 'jaxroll[hf]', or remove the template to use the plain format."
        raise ConfigError("tokenizer.path", where, reason, remedy) from error

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    remedy = "Fix the template, or remove it to use the plain format."
    environment = template_bounds.BoundedEnvironment(_tojson)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}
    try:
        template = environment.from_string(environment.parsed(source))
    except template_bounds.TooMuch as error:
        raise ConfigError("tokenizer.path", where, f"its chat template is too large: {error}", remedy) from error
    except Exception as error:  # for deep nesting, the parser and Python's compiler raise more than TemplateError
        reason = f"its chat template does not parse: {_cause(error)}"
        raise ConfigError("tokenizer.path", where, reason, remedy) from error
    _check_args(template_args or {}, template_bounds.variables(environment, source), where)
    shown: set[str] = set()  # tools that the template is known to show

    def render(messages: tuple[Message, ...], tools: Tools = (), *, whole: bool = False) -> str:
        if tools and (named := _tojson(tools, sort_keys=True)) not in shown:
            if rendered(messages, tools) == rendered(messages, ()):
                reason = f"the chat template of {where} does not show tools"
                remedy = "Describe them in task.system_prompt, or use a model that has tools."
                raise ConfigError("task.tools", _tool_names(tools), reason, remedy)
            shown.add(named)
        return rendered(messages, tools, whole)

    def rendered(messages: tuple[Message, ...], tools: Tools, whole: bool = False) -> str:
        turns = [{"role": message.role, "content": message.content} for message in messages]
        variables = {
            "documents": None,
            **(template_args or {}),
            "messages": turns,
            "tools": list(tools) or None,
            "add_generation_prompt": not whole,
        }
        try:
            return template_bounds.metered(template.render, **{**special_tokens, **variables})
        except template_bounds.TooMuch as error:
            raise ConfigError("tokenizer.path", where, f"its chat template does too much: {error}", remedy) from error
        except Exception as error:  # a template is a program, so its expressions may raise anything
            raise DataError(f"the chat template of {where} refused the messages: {_cause(error)}") from error

    return render


def _check_args(args: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    """Refuse arguments that the template does not read, because they would have no effect."""
    for name, value in args.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            remedy = f"Did you mean {close[0]!r}?" if close else f"It reads {', '.join(sorted(known)) or 'none'}."
            reason = f"the chat template of {where} does not read it"
            raise ConfigError(f"tokenizer.template_args.{name}", value, reason, remedy)


def _tool_names(tools: Tools) -> str:
    functions = [tool.get("function", tool) for tool in tools]
    return ", ".join(str(each.get("name", "?")) if isinstance(each, Mapping) else "?" for each in functions)


def _cause(error: Exception) -> str:
    """The error's message, with its type unless it is one of Jinja's."""
    named = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
    return one_line(f"{named}{error}", 300)


def continuation(render: ChatFormat, messages: tuple[Message, ...], eos_token: str, tools: Tools = ()) -> str:
    """The text of `messages` after an answer of the assistant that ended with `eos_token`."""
    # Templates render whole conversations, so an earlier exchange is put in front and its text is removed.
    answer, number = _EARLIER_ANSWER, 0
    while any(answer in message.content or answer in message.role for message in messages):
        answer, number = f"{_EARLIER_ANSWER}-{number}-", number + 1
    earlier = (Message("user", _EARLIER_QUESTION), Message("assistant", answer))
    _, marker, rest = render(earlier + messages, tools).rpartition(answer)
    if not marker:
        raise DataError("the chat template does not show earlier answers, so it cannot serve more than one turn")
    return rest.removeprefix(eos_token)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which is not what models were trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    # A fixed day, so that a resumed run has the same prompts as an uninterrupted one.
    return datetime(2025, 1, 1).strftime(pattern)
