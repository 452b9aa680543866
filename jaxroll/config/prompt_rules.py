"""Messages that the config places before every prompt, tool schemas, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxroll.config.schema import Config, TaskConfig
from jaxroll.errors import ConfigError
from jaxroll.records import Message

FILES = ("jsonl", "parquet", "hf_dataset")  # values of task.source that read task.path
ROLES = ("system", "user", "assistant", "tool")
# Variables of a chat template that JaxRoll sets itself.
RESERVED = ("messages", "tools", "add_generation_prompt")


def opening_messages(task: TaskConfig) -> tuple[Message, ...]:
    """The messages before the question: `task.system_prompt`, then `task.few_shot`. ConfigError for malformed ones."""
    system = (Message("system", task.system_prompt),) if task.system_prompt else ()
    return system + few_shot(task)


def few_shot(task: TaskConfig) -> tuple[Message, ...]:
    """The messages of `task.few_shot`: objects with role and content, or pairs of a question and its answer."""
    found: list[Message] = []
    for number, entry in enumerate(task.few_shot):
        key = f"task.few_shot[{number}]"
        if isinstance(entry, list):
            if len(entry) != 2 or not all(isinstance(text, str) for text in entry):
                raise ConfigError(key, entry, "not a pair of texts", 'Write ["question", "answer"].')
            found += (Message("user", entry[0]), Message("assistant", entry[1]))
        else:
            found.append(_message(entry, key))
    if found and found[-1].role != "assistant":
        last = f"task.few_shot[{len(task.few_shot) - 1}]"
        raise ConfigError(last, found[-1].role, "the last message before the question must be an answer",
                          "End with a message of the assistant, or use pairs.")  # fmt: skip
    return tuple(found)


def _message(entry: Any, key: str) -> Message:
    remedy = 'Write {"role": "user", "content": "…"}, or a pair ["question", "answer"].'
    if not isinstance(entry, Mapping) or set(entry) != {"role", "content"}:
        raise ConfigError(key, entry, "not a message with role and content", remedy)
    role, content = entry["role"], entry["content"]
    if role not in ROLES or role == "system" or not isinstance(content, str):
        reason = "a system message belongs into task.system_prompt" if role == "system" else "role or content is wrong"
        raise ConfigError(key, entry, reason, f"Roles are user, assistant and tool. {remedy}")
    return Message(role, content)


def check_prompts(config: Config) -> None:
    """Raise ConfigError for malformed messages and tools, and for settings that the tokenizer cannot show."""
    opening_messages(config.task)
    for number, tool in enumerate(config.task.tools):
        if not isinstance(tool, Mapping):
            raise ConfigError(
                f"task.tools[{number}]", tool, "not a JSON schema", "Write an object, as for OpenAI's API."
            )
    if config.task.source not in FILES:
        for name in ("prompt_column", "answer_column", "answer_after"):
            if value := getattr(config.task, name):
                raise ConfigError(f"task.{name}", value,
                                  f"task.source = {config.task.source!r} has no rows with columns",
                                  f"Set task.source to one of {', '.join(FILES)}, or leave it out.")  # fmt: skip
    if config.tokenizer.kind != "hf":
        for key, value in (
            ("tokenizer.template_args", config.tokenizer.template_args),
            ("task.tools", config.task.tools),
        ):
            if value:
                raise ConfigError(key, value, "only chat templates read it, and tokenizer.kind is 'char'",
                                  f"Set tokenizer.kind to 'hf', or leave {key} out.")  # fmt: skip
    for name in RESERVED:
        if name in config.tokenizer.template_args:
            remedy = "Use task.tools for tools." if name == "tools" else "Leave it out."
            raise ConfigError(f"tokenizer.template_args.{name}", config.tokenizer.template_args[name],
                              "JaxRoll sets this variable itself", remedy)  # fmt: skip
