"""Plain programs: the part of Python that may share a process, and outcomes that do not depend on the batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from benchmarks.lib import hacks
from jaxroll.rewards import plain
from jaxroll.rewards.programs import Outcome, Run, SandboxedPrograms

PLAIN = {
    "print(int(input()) + 1)": "42\n",
    "a, b = map(int, '3 4'.split())\nprint(a * b, sep='')": "12\n",
    "def f(n: int) -> int:\n  return 1 if n < 2 else n * f(n - 1)\nprint(f(5))": "120\n",
    "s = {}\nfor c in 'abca': s[c] = s.get(c, 0) + 1\nprint(sorted(s.items(), key=lambda p: -p[1])[0])": "('a', 2)\n",
    "if __name__ == '__main__':\n  print(f'{[x for x in range(3) if x % 2]!r:>5}')": "  [1]\n",
    "global x\nint = x = 3\nprint(x)": "3\n",
    "total: int = 0\nwhile True:\n  total += 1\n  if total > 3: break\nprint('%d' % total)": "4\n",
    "_ = [print(n) for n in (1,)]": "1\n",
}
# Ways to a module, a frame, a mutable type, the streams, or to code that runs after the end of a program.
NOT_PLAIN = [
    "import os",
    "from os import path",
    "().__class__",
    "''.__class__.__base__.__subclasses__()",
    "print.__self__",
    "(lambda: 0).__globals__",
    "(x for x in ()).gi_frame",
    "(x for x in ()).gi_frame.f_back.f_globals",
    "'{0.__class__}'.format(1)",
    "'{x.__class__}'.format_map({})",
    "f'{().__class__}'",
    "f'{1:{().__class__}}'",
    "__builtins__",
    "__builtins__ = {}",
    "__name__ = 'x'",
    "global __builtins__",
    "def __import__(*a): pass",
    "def f(__builtins__): pass",
    "lambda __loader__: 0",
    "dict(__class__=1)",
    "del __builtins__",
    "for __builtins__ in (): pass",
    "[0 for __builtins__ in ()]",
    "(__builtins__ := 1)",
    "getattr(1, 'real')",
    "gｅtattr(1, 'real')",  # the parser normalizes names
    "setattr",
    "eval('1')",
    "exec('1')",
    "compile('1', '', 'eval')",
    "open('/etc/passwd')",
    "vars()",
    "globals()",
    "type('T', (), {})",
    "object",
    "super",
    "id(1)",
    "hash(1)",
    "memoryview(b'')",
    "breakpoint()",
    "class A: pass",
    "try: pass\nfinally: print(1)",
    "try: pass\nexcept* ValueError: pass",
    "with print: pass",
    "raise SystemExit",
    "def f(): yield",
    "def f(): yield from ()",
    "async def f(): await f()",
    "match 1:\n  case int(real=x): pass",
    "[].sort.extra",
    "x = 1\nx.extra = 2",
]


def batch(*programs: str, given: bytes = b"41\n") -> bytes:
    parts = [(source.encode(), given) for source in programs]
    return b"".join(len(s).to_bytes(4, "little") + len(g).to_bytes(4, "little") + s + g for s, g in parts)


def records(data: bytes) -> Iterator[tuple[int, str]]:
    while data:
        end = 5 + int.from_bytes(data[1:5], "little")
        yield data[0], data[5:end].decode()
        data = data[end:]


def test_plain_programs_run_one_after_the_other() -> None:
    found = list(records(plain.outcomes(batch(*PLAIN))))
    assert found == [(plain.FINISHED, printed) for printed in PLAIN.values()]


@pytest.mark.parametrize("source", NOT_PLAIN)
def test_a_program_that_could_reach_more_than_its_own_data_is_not_run(source: str) -> None:
    assert not plain.is_plain(ast.parse(source))
    assert list(records(plain.outcomes(batch(f"print(1)\n{source}", "print(2)")))) == [
        (plain.ALONE, ""),
        (plain.FINISHED, "2\n"),
    ]


def test_what_depends_on_earlier_programs_has_no_outcome() -> None:
    found = list(records(plain.outcomes(batch("print(lambda: 0)", "print('x' * 9000)", "x", "print(2)"))))
    assert found == [(plain.ALONE, ""), (plain.ALONE, ""), (plain.FAILED, ""), (plain.FINISHED, "2\n")]
    deep = "def f(): return f()\nf()"
    assert list(records(plain.outcomes(batch("print(1)", deep, "print(2)")))) == [(plain.FINISHED, "1\n")]
    slow = "for _ in range(10**7): pass\nprint(1)"
    assert list(records(plain.outcomes(batch(slow, "print(2)")))) == [(plain.FINISHED, "1\n")]


# Programs that would harm others in their process if these had to share it to their end.
HARMFUL = [
    "int = print = input = None",
    "del print",
    "x = [0] * 10**9",
    "print('x' * 10**6)",
    "print(input(), input())",
    "def f(): return f()\nf()",
    "x = []\nfor _ in range(10**5): x = [x]\nprint(x)",
    "(" * 500,
    "-" * 3000 + "1",
    "print('\\0')\0",
    "print('\\ud800')",
    "10**10**8",
]
RIGHT = "print(int(input()) + 1)"


@pytest.mark.process
def test_the_outcome_of_a_program_does_not_depend_on_its_batch() -> None:
    programs = SandboxedPrograms()
    try:
        hacking = (each for each in hacks.PRINTING.values() if "import" not in each and "while" not in each)
        for source in (*HARMFUL, *hacking):
            run = Run(source, b"41\n", time_limit_s=0.3)
            (alone,) = programs.run([run])
            first, outcome, last = programs.run([Run(RIGHT, b"41\n"), run, Run(RIGHT, b"42\n")])
            assert (first, last) == (Outcome(b"42\n"), Outcome(b"43\n")), source
            assert outcome.failure == alone.failure, source
            assert outcome.output == alone.output or alone.failure, source
    finally:
        programs.close()
