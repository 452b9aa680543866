"""Chat templates that compute forever, build without end or reach for Python: refused in one line, within bounds."""

from __future__ import annotations

from typing import Any

import pytest

from jaxroll.errors import ConfigError, DataError, JaxRollError
from jaxroll.records import Message
from jaxroll.text import tokenizers
from tests.harness.resource_bounds import bounded, check_refusal

jinja2 = pytest.importorskip("jinja2", reason="chat templates are an optional extra")

HELLO = (Message("user", "hello"),)
LONG = "{% set x = 'abcdefgh' %}" + "{% set x = x ~ x %}" * 60
WHERE = "model/chat_template.jinja"

DOES_TOO_MUCH = {
    "nested loops": "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4,
    "nested loops that write": "{% for a in range(99999) %}" * 3 + "x" + "{% endfor %}" * 3,
    "nested lazy loops": "{% for a in range(99999)|map('string') %}" * 3 + "{% endfor %}" * 3,
    "a loop that counts": "{% for a in range(99999) %}{% for b in range(99999) if a == b %}{% endfor %}{% endfor %}",
    "a text doubled": LONG + "{{ x }}",
    "a text added to itself": LONG.replace("~", "+"),
    "a text doubled in a block": "{% set x = 'a' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
    "a text doubled by join": "{% set x = 'a' %}" + "{% set x = [x, x]|join %}" * 60,
    "a text doubled by format": "{% set x = 'a' %}" + "{% set x = '%s%s' % (x, x) %}" * 60,
    "a text doubled by str.format": "{% set x = 'a' %}" + "{% set x = '{0}{0}'.format(x) %}" * 60,
    "a text doubled in a macro": "{% macro f(x, n) %}{{ f(x ~ x, n - 1) if n else x }}{% endmacro %}{{ f('ab', 60) }}",
    "a list of lists": "{% set x = ['a'] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "a tuple of tuples": "{% set x = ('a',) %}" + "{% set x = (x, x) %}" * 60 + "{{ x|string }}",
    "a dict of dicts": "{% set x = {} %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x|tojson }}",
    "a list added to itself": "{% set x = ['abc'] %}" + "{% set x = x + x %}" * 60,
    "a namespace in namespaces": "{% set x = 'a' %}" + "{% set x = namespace(a=x, b=x) %}" * 60 + "{{ x }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.n = n %}{{ n|string }}",
    "a text times 10**10": "{{ 'x' * 10**10 }}",
    "10**10 times a text": "{{ 10**10 * 'x' }}",
    "a list times 10**10": "{{ [0] * 10**10 }}",
    "a power of powers": "{{ 10**(10**10) }}",
    "a power by an unknown": "{{ (messages|length + 1) ** (10**9) }}",
    "squares": "{% set n = 2 ** 100 %}" + "{% set n = n * n %}" * 60 + "{{ n }}",
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a wide number by the side": "{{ '%*d' % (2000000000, 1) }}",
    "a wide number by format": "{{ '{:>2000000000}'.format(1) }}",
    "a wide number by nested format": "{{ '{:>{}}'.format(1, 2000000000) }}",
    "a wide number by the filter": "{{ '%2000000000d'|format(1) }}",
    "replaced by much": "{% set x = 'a' * 10**6 %}{{ x.replace('', x) }}",
    "replaced by much in a filter": "{% set x = 'a' * 10**6 %}{{ x|replace('a', x) }}",
    "replaced by much, named": "{% set x = 'a' * 10**6 %}{{ x|replace(new=x, old='a') }}",
    "joined by much": "{% set x = 'a' * 10**6 %}{{ x.join(range(99999)|map('string')|list) }}",
    "joined by much in a filter": "{% set x = 'a' * 10**6 %}{{ range(99999)|join(x) }}",
    "indented by much": "{{ ('a\n' * 10**6)|indent(10**6) }}",
    "indented JSON": "{{ ([1] * 10**5)|tojson(indent=10**6) }}",
    "JSON with wide separators": "{{ ([1] * 10**5)|tojson(separators=('a' * 10**6, 'b')) }}",
    "rounded to 10**9 places": "{{ 1.5|round(10**9, 'floor') }}",
    "10**9 slices": "{{ [1]|slice(10**9)|list }}",
    "a batch of 10**9": "{{ [1]|batch(10**9, 'x')|list }}",
    "two calls in each": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    "searched forever": "{% set x = 'a' * 10**6 %}{% for a in range(99999) %}{{ 'b' in x[1:] }}{% endfor %}",
}

COUNTED = {source for name, source in DOES_TOO_MUCH.items() if "text" in name}  # those that build rather than compute

RAISES = {
    "division by zero": "{{ 1 / 0 }}",
    "division by a length": "{{ 1 // (messages|length - 1) }}",
    "modulo zero": "{{ 1 % 0 }}",
    "a range of 10**9": "{% for a in range(10**9) %}{% endfor %}",
    "no such key": "{{ messages[7].content.x }}",
    "an unknown name": "{{ nothing.at.all }}",
    "an unknown function": "{{ open('/etc/passwd').read() }}",
    "text plus number": "{{ 'a' + 1 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop that calls itself": "{% for a in [[1]] recursive %}{{ loop([a]) }}{% endfor %}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "the class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the class by index": "{{ ''['__class__']['__mro__'] }}",
    "the class by map": "{{ ['']|map(attribute='__class__.__mro__')|list|first|first }}{{ 1/0 }}",
    "the globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "the globals by format": "{{ '{0.__globals__[os]}'.format(raise_exception) }}",
    "the globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__.x }}",
    "the code of a namespace": "{{ namespace.__init__.__globals__.os.system('true') }}",
    "the environment": "{{ self._TemplateReference__context.environment.x }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "bytes of a number": "{{ (5).to_bytes(2000000000, 'big') }}",
    "a table for a text": "{{ 'aaa'.translate({97: 'x' * 1000}) }}",
    "tabs": "{{ '\t'.expandtabs(2000000000) }}",
    "a method that is left out": "{{ 'a'.ljust(2000000000) }}",
    "an own message": "{{ raise_exception('no\nsuch\x1b[2J' * 1000) }}",
    "a message that is not text": "{{ raise_exception([]) }}",
}

DOES_NOT_PARSE = {
    "an unknown filter": "{{ 'a'|nothing }}",
    "a filter that is left out": "{{ 'a'|center(2000000000) }}",
    "the class by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "a tag that is not closed": "{% for a in messages %}",
    "no expression": "{{ }}",
    "a deep expression": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "a deep list": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "a long chain": "{{ a" + ".a" * 50_000 + " }}",
    "many signs": "{{ " + "-" * 100_000 + "1 }}",
    "deep loops": "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "deep blocks": "{% filter upper %}{% with %}{% set a %}" * 100 + "{% endset %}{% endwith %}{% endfilter %}" * 100,
    "deep macros": "{% macro f() %}" * 100 + "{% endmacro %}" * 100,
    "deep conditions": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "300,000 characters": "x" * 300_000,
    "a surrogate as a name": "{{ \ud800 }}",
}


def render(source: str, messages: tuple[Message, ...] = HELLO, **special: str) -> str:
    return tokenizers.jinja_format(source, special, WHERE)(messages)


@pytest.mark.parametrize("source", DOES_TOO_MUCH.values(), ids=DOES_TOO_MUCH)
def test_a_template_that_does_too_much_ends_the_run_and_not_the_machine(source: str) -> None:
    with bounded(256 << 20 if source in COUNTED else None, time_s=100.0), pytest.raises(ConfigError) as refused:
        render(source)
    check_refusal(refused.value, "tokenizer.path", WHERE, "remove it")


@pytest.mark.parametrize("source", RAISES.values(), ids=RAISES)
def test_a_template_that_raises_refuses_its_messages(source: str) -> None:
    with bounded(), pytest.raises(DataError) as refused:
        render(source)
    check_refusal(refused.value, WHERE)


@pytest.mark.parametrize("source", DOES_NOT_PARSE.values(), ids=DOES_NOT_PARSE)
def test_a_template_that_does_not_parse_is_named(source: str) -> None:
    with bounded(None), pytest.raises(JaxRollError) as refused:
        render(source)
    assert isinstance(refused.value, ConfigError)
    check_refusal(refused.value, "tokenizer.path", WHERE)


QWEN3 = """{%- if tools %}{{- tools | tojson }}{%- else %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(
 message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}
{%- else %}{%- set content = '' %}{%- endif %}
{%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}{%- set reasoning_content = '' %}{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
{{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

HARMLESS = {
    "Qwen3": QWEN3,
    "a macro": "{% macro show(m, n=2) %}[{{ m.role|upper }}]{{ m['content']|trim }}{{ n }}{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.index) }}{{ loop.previtem.role if not loop.first }}{% endfor %}",
    "filters": "{{ messages|map(attribute='role')|unique|sort|join(', ') }} {{ messages|selectattr('role', 'equalto',"
    " 'user')|list|length }} {{ {'b': 1, 'a': [2]}|dictsort|tojson }} {{ messages[-1]|tojson(indent=4) }}",
    "formats": "{{ '%s: %03d' % ('a', 7) }} {{ '{:,} {}'.format(1234567, 'b') }} {{ '%d'|format(99999) }}",
    "breaks": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "blocks": "{% set x %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ x|replace('e', 'ee') }}",
    "items": "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ 1 }};{% endfor %}{{ messages[0].get('x', 'y') }}",
    "conditions": "{{ 'a' if messages|length > 1 else 'b' }}{{ nothing }}{{ nothing|default('c') }}{{ x is defined }}",
    "batches": "{% for row in range(7)|batch(3, 0) %}{{ row|join('-') }};{% endfor %}{{ range(5)|list|reverse|first }}",
    "a filter block": "{% filter upper %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
    "a recursive loop": "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    "unicode": "{{ 'é\u200b🎲'|upper }}{{ '<b>'|e }}{{ bos_token }}",
}
CONVERSATION = (
    Message("system", "be brief"),
    Message("user", " what is 2+2? "),
    Message("assistant", "<think>\nfour\n</think>4"),
    Message("user", "<really>"),
    Message("assistant", "yes"),
)


@pytest.mark.parametrize("messages", [HELLO, CONVERSATION], ids=["one", "five"])
@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
def test_a_harmless_template_renders_as_in_jinja(source: str, messages: tuple[Message, ...]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    plain.filters["tojson"] = tokenizers._tojson
    turns: list[Any] = [{"role": message.role, "content": message.content} for message in messages]
    wanted = plain.from_string(source).render(messages=turns, add_generation_prompt=True, bos_token="<s>", tools=None)
    assert render(source, messages, bos_token="<s>") == wanted


def test_a_long_conversation_stays_within_the_bounds() -> None:
    turns = [
        Message("user" if i % 2 == 0 else "assistant", f"<think>\n{i}\n</think>" + "text " * 2000) for i in range(80)
    ]
    with bounded(memory_bytes=256 << 20):
        assert render(QWEN3, tuple(turns)).count("<|im_start|>") == 81
