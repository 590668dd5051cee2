"""A conversation becomes the text that transformers makes of it, and a hostile template harms nobody."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from k2convert.errors import CalibrationError
from k2convert.text.tokenizers import ChatTemplate, open_tokenizer
from k2convert.text.windows import text_of_line

TEMPLATE = """{%- macro say(message) -%}
  {%- if message['content'] is string -%}{{ message['content'] }}
  {%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>
{%- endif -%}
{% for message in messages %}
  {%- if loop.first and message['role'] != 'system' -%}
    <|im_system|>system<|im_middle|>You are <Kimi> & friends.<|im_end|>
  {%- endif -%}
  {%- if message['role'] == 'nobody' %}{{ raise_exception('no such role') }}{% endif -%}
  {%- if message['role'] == 'stop' %}{% break %}{% endif -%}
  <|im_{{ message['role'] }}|>{{ message.get('name', message['role']) | trim }}<|im_middle|>
  {%- if message.get('tool_calls') -%}{{ message['tool_calls'] | tojson }}{%- endif -%}
  {% generation %}{{ say(message) }}{% endgeneration %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""

USER = {"role": "user", "content": 'Wer bist du? <b> & "q" 你好 🙂 <|endoftext|>'}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    ([USER], None),
    ([{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": " Ich\n bin \n"}], None),
    ([{"role": "user", "name": " Ada ", "content": [{"type": "text", "text": "Hi"}]}], None),
    ([{"role": "assistant", "content": "", "tool_calls": [{"id": "f:0", "x": "é<"}]}], [{"type": "function", "b": 1}]),
    ([USER, {"role": "stop", "content": ""}, USER], []),
]

GUIDE = Path(__file__).resolve().parents[2] / "k2convert" / "guide" / "calibrate.md"
EXAMPLE = next(line.strip() for line in GUIDE.read_text().splitlines() if line.startswith('    {"messages"'))
"""A line of a .jsonl file with a tool call."""


@pytest.fixture
def folder(tmp_path: Path, tiny: Path) -> Path:
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    return configure(tmp_path, chat_template=TEMPLATE)


def configure(folder: Path, **config: object) -> Path:
    tokens = {"bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"}, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TokenizersBackend"} | tokens | config)
    )
    return folder


def rendered(folder: Path, tools: list[Any] | None = None) -> str:
    """A conversation of one message, by the template of a folder."""
    return ChatTemplate(folder).render([USER], tools)


def test_a_conversation_equals_transformers_own(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = open_tokenizer(folder)
    template = ChatTemplate(folder)
    for messages, tools in CONVERSATIONS:
        text = template.render(messages, tools)
        assert text == theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        ids = theirs.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        assert ours.encode(text, special=True).tolist() == ids


TOOLS = [
    {"type": "function", "function": {"parameters": {"b": 1, "a": {"d": [{"z": 1, "y": 2}], "c": 3}}, "name": "f"}}
]


def test_tools_of_kimis_own_tokenizer_have_sorted_keys(folder: Path) -> None:
    configure(folder, chat_template=TEMPLATE, tokenizer_class="TikTokenTokenizer")
    declared = '{"function":{"name":"f","parameters":{"a":{"c":3,"d":[{"y":2,"z":1}]},"b":1}},"type":"function"}'
    assert f"<|im_middle|>[{declared}]<|im_end|>" in rendered(folder, TOOLS)


def test_tools_in_typescript_are_refused_with_a_way_out(folder: Path) -> None:
    configure(folder, chat_template="{% if tools_ts_str %}{{ tools_ts_str }}{% else %}{{ tools }}{% endif %}")
    for tools in (None, []):
        rendered(folder, tools)
    with pytest.raises(CalibrationError, match=r"tools in TypeScript.*Leave out conversations with tools, or pass"):
        rendered(folder, TOOLS)


def test_the_example_line_is_rendered_with_its_tool_call(folder: Path) -> None:
    line = json.loads(EXAMPLE)
    call = json.dumps(line["messages"][1]["tool_calls"])
    tools = json.dumps(line["tools"], separators=(",", ":"))
    parts = [
        ("user", "How warm is it in Bonn?"),
        ("assistant", call),
        ("tool", "12 degrees"),
        ("assistant", "12 degrees."),
    ]
    turns = "".join(f"<|im_{role}|>{role}<|im_middle|>{content}<|im_end|>\n" for role, content in parts)
    expected = (
        f"<|endoftext|><|im_system|>tool_declare<|im_middle|>{tools}<|im_end|><|im_system|>system<|im_middle|>"
        f"You are <Kimi> & friends.<|im_end|>{turns}"
    )
    template = ChatTemplate(folder)
    text = template.render(line["messages"], line["tools"])
    ids = text_of_line(EXAMPLE, open_tokenizer(folder), template, Counter())
    assert "".join(text.split()) == "".join(expected.split())
    assert (ids == open_tokenizer(folder).encode(text, special=True)).all()


def test_the_template_is_found_where_transformers_finds_it(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="has no chat template"):
        rendered(tmp_path)
    named = [{"name": "default", "template": "max"}, {"name": "tool_use", "template": "tools"}]
    configure(tmp_path, chat_template=named)
    assert (rendered(tmp_path), rendered(tmp_path, [{"type": "function"}])) == ("max", "tools")
    (tmp_path / "chat_template.jinja").write_text("from the file{{ eos_token }}")
    assert rendered(tmp_path) == "from the file<|endoftext|>"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('touch escaped') }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% for i in %}", "TemplateSyntaxError"),
        ("{{ undefined.attribute }}", "UndefinedError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'x' * 10 ** 8 }}", "more than 67,108,864 characters"),
        ("{% include '/etc/hostname' %}", "TypeError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
    ],
)
def test_a_hostile_template_is_one_line(template: str, complaint: str, tmp_path: Path) -> None:
    configure(tmp_path, chat_template=template)
    with pytest.raises(CalibrationError, match=complaint) as failure:
        rendered(tmp_path)
    assert "\n" not in str(failure.value)
    assert 'Use lines with "text"' in str(failure.value)


def test_a_template_whose_name_is_no_text_is_one_line(tmp_path: Path) -> None:
    for name in (["default"], 5, None, {}):
        configure(tmp_path, chat_template=[{"name": name, "template": "x"}, {"name": "default", "template": "x"}])
        with pytest.raises(CalibrationError, match=r"tokenizer_config\.json: chat_template has"):
            rendered(tmp_path)


def test_the_date_of_a_template_is_fixed(tmp_path: Path) -> None:
    """The same text gives the same tokens on every day."""
    configure(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}")
    assert rendered(tmp_path) == "01 Jan 2026"
