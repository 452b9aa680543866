"""Conversations that took place as tokens: what an episode of the same words would have held."""

from __future__ import annotations

from jaxroll.protocols import Tokenizer
from jaxroll.records import Message


def runs(text: Tokenizer, first: tuple[Message, ...], said: tuple[Message, ...]) -> list[tuple[list[int], bool]]:
    """The token runs of a conversation, end to end, and whether each is the assistant's.

    It opens with `first`; `said` are the assistant's answers, which each end in eos, and what it is shown between them.
    """
    found: list[tuple[list[int], bool]] = []
    shown, opening = list(first), True
    for message in said:
        if message.role != "assistant":
            shown.append(message)
            continue
        found.append((text.render(tuple(shown), first=opening), False))
        found.append(([*text.encode(message.content), text.eos_id], True))
        shown, opening = [], False
    return found
