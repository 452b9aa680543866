"""The task of both arms of benchmarks/grpo, with numpy alone, for either arm's environment.

All answers have the same length because the model is built so (`benchmarks/grpo/start.py`): every letter belongs to a
link of a chain, and a letter of the next link follows it; after the last link the answer ends. The policy chooses the
letter within a link, and the reward depends on it: rewards vary, and the model can learn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PAD, BOS, END, TURN, FIRST = 0, 1, 2, 3, 4  # of our character tokenizer: padding, conversation, end of answer, "speak"
VOCABULARY = 256
GROUPS, GROUP = 8, 8  # prompts a step, answers a prompt
LEARNING_RATE, BETAS, MAX_NORM = 1e-4, (0.9, 0.95), 1.0
_LETTERS = 0x4E00  # characters without upper and lower case


@dataclass(frozen=True)
class Work:
    """One task: prompts of `prompt_tokens`, `turns` answers of `links` letters and the end, `latency_s` each."""

    links: int
    choices: int  # letters of one link
    turns: int = 1
    prompt_tokens: int = 16
    latency_s: float = 0.0

    @property
    def answer_tokens(self) -> int:
        """Tokens of one turn's answer, its end included."""
        return self.links + 1

    @property
    def shown_tokens(self) -> int:
        """Tokens of the environment's message between two turns: a letter, and the token that begins the next turn."""
        return 2

    @property
    def conversation_tokens(self) -> int:
        """Tokens of a whole conversation after its prompt."""
        return self.turns * self.answer_tokens + (self.turns - 1) * self.shown_tokens

    @property
    def letters(self) -> int:
        """Distinct ones."""
        return self.links * self.choices

    def question(self, number: int) -> np.ndarray:
        """int [prompt_tokens − 2]: the letters of question `number`; it is between bos and turn."""
        return np.random.default_rng([7, number]).integers(0, self.letters, self.prompt_tokens - 2)

    def prompt(self, number: int) -> list[int]:
        """The ids of question `number`, as the model sees them."""
        return [BOS, *(FIRST + self.question(number)).tolist(), TURN]

    def answer(self, chance: np.random.Generator) -> np.ndarray:
        """int32 [answer_tokens]: a random answer as the model gives it."""
        drawn = FIRST + self.choices * np.arange(self.links) + chance.integers(0, self.choices, self.links)
        return np.append(drawn, END).astype(np.int32)

    def wanted(self, question: np.ndarray) -> int:
        """The index within each link of the letter that the question asks for."""
        return int(question[-1]) % self.choices

    def reward(self, question: np.ndarray, letters: np.ndarray) -> float:
        """The share of right letters in an answer, the k-th with weight √k, which makes ties rare.

        A member with exactly its group's mean has no gradient, which one of the learners would not compute.
        """
        worth = np.sqrt(np.arange(1, self.links + 1))
        right = letters[: self.links] % self.choices == self.wanted(question)
        return float(worth[: len(right)] @ right / worth.sum())

    def small(self) -> Work:
        """A small version of the work, with shorter answers, for --quick."""
        return replace(self, links=7, latency_s=self.latency_s / 4)


def text(letters: np.ndarray) -> str:
    """Letters as characters, for a tokenizer whose alphabet they are."""
    return "".join(chr(_LETTERS + int(letter)) for letter in letters)


def letters(text: str) -> np.ndarray:
    """int [n]: the inverse of `text`; −1 for other characters."""
    codes = np.array([ord(character) - _LETTERS for character in text], np.int64)
    return np.where((codes >= 0) & (codes < VOCABULARY), codes, -1)


@dataclass(frozen=True)
class Batch:
    """N conversations of one optimizer step: prompts, then the tokens of all turns; `mask` is True for the model's."""

    prompts: np.ndarray  # int32 [N, P]
    said: np.ndarray  # int32 [N, T], 0 after the end
    mask: np.ndarray  # bool [N, T]
    rewards: np.ndarray  # float32 [N], in groups of GROUP
    advantages: np.ndarray  # float32 [N]

    def save(self, path: Path) -> None:
        """Write it."""
        np.savez(path, **vars(self))

    @staticmethod
    def load(path: Path) -> Batch:
        """Read it."""
        with np.load(path) as file:
            return Batch(**{name: file[name] for name in file.files})


def batch(work: Work, seed: int = 3) -> Batch:
    """One step's conversations, cut at different lengths: otherwise the loss of GRPO's first step would always be 0."""
    chance, count = np.random.default_rng(seed), GROUPS * GROUP
    prompts = np.array([work.prompt(row // GROUP) for row in range(count)], np.int32)
    said, mask = (
        np.zeros((count, work.conversation_tokens), np.int32),
        np.zeros((count, work.conversation_tokens), bool),
    )
    for row in range(count):
        parts = []
        for turn in range(work.turns):
            parts += [work.answer(chance)] + ([np.array([FIRST, TURN], np.int32)] if turn + 1 < work.turns else [])
        tokens = np.concatenate(parts)
        sampled = np.concatenate([np.full(len(part), index % 2 == 0) for index, part in enumerate(parts)])
        length = int(chance.integers(work.answer_tokens // 2, len(tokens) + 1))
        said[row, :length], mask[row, :length] = tokens[:length], sampled[:length]
    rewards = chance.random(count).astype(np.float32)
    groups = rewards.astype(np.float64).reshape(-1, GROUP)
    centred = (groups - groups.mean(1, keepdims=True)) / groups.std(1, ddof=1, keepdims=True)
    return Batch(prompts, said, mask, rewards, centred.astype(np.float32).ravel())
