"""What to do about a member that failed, by the words of its error."""

from __future__ import annotations

_REMEDY = "a wrong answer is a reward, not a failure; raise DataError for a task that nobody could work on"
# The first whose sign occurs in the error says what to do.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("longer than",), "return sooner, or declare a larger step_limit_s or reset_limit_s"),
    (("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "cancelled itself"),
     "raise DataError or InfraError instead"),
    (("process died", "process is gone"), "it must not end its process"),
    (("no scoring pool",), "an environment in a process judges the answer itself"),
    (("scoring took", "scoring process", "scoring failed"), "mend the scorer: it must return a finite number in time"),
    (("no room for an answer",), "show a shorter first message, or raise task.max_prompt_tokens"),
    (("not in the alphabet",), "use characters of the task's prompts and answers, or tokenizer.kind='hf'"),
    (("shows nothing",), "return done=True, or messages to answer"),
    (("a value of type", "is None", "nan", "inf,", "finite", "surrogate", "characters", "entries"),
     "return a StepResult whose fields have the types of jaxroll/protocols.py"),
    (("must be between", "it is no number", "place ="), "see the table of attributes in docs/add_an_environment.md"),
    (("InfraError",), "it says that the machinery failed: see whether what it needs is running"),
)  # fmt: skip


def remedy(error: str) -> str:
    """What the author of the environment can do about `error`."""
    return next((do for signs, do in _REMEDIES if any(sign in error for sign in signs)), _REMEDY)
