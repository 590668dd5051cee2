"""Conversations to text: the chat template of a source folder, rendered as transformers does.

A template comes from the checkpoint, and a template is a program. transformers runs it in jinja2's immutable sandbox,
which lets it reach no file and no object of Python's. The sandbox bounds neither time nor memory.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from k2convert.checkpoint.files import is_there, mapping_or_empty, read_json_file, read_text_file
from k2convert.checkpoint.names import CHAT_TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from k2convert.errors import CalibrationError, cut, quoted, remedy

_MAX_CHARACTERS: Final = 64 << 20
_DATE: Final = datetime(2026, 1, 1)
_NAMED_TOKENS: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_KIMI_TOKENIZER: Final = "TikTokenTokenizer"
"""The class of Kimi's tokenizers. Their code sorts the keys of tools before the template gets them."""
_TYPESCRIPT: Final = "tools_ts_str"
"""The variable in which the code of K2.5's tokenizer, 480 lines that are not run, gives its template the tools."""
_REMEDY: Final = 'Use lines with "text", or a checkpoint with a working chat template.'


class ChatTemplate:
    """The chat template of a folder, which is read with the first conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._sorts_tools = False

    def render(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Return a conversation as the model sees it, as transformers' apply_chat_template does.

        Raises CalibrationError if there is no template, or it fails.
        """
        if not self._templates:
            self._templates, self._variables, tokenizer = read_templates(self._folder)
            self._sorts_tools = tokenizer == _KIMI_TOKENIZER
        if tools and any(_TYPESCRIPT in template for template in self._templates.values()):
            raise CalibrationError(
                "this checkpoint declares tools in TypeScript, which only its own code writes, and that is not run. "
                "Leave out conversations with tools, or pass token ids (.npy)."
            )
        if tools and self._sorts_tools:
            tools = json.loads(json.dumps(tools, sort_keys=True))
        name = "default" if tools is None or "tool_use" not in self._templates else "tool_use"
        from transformers.utils.chat_template_utils import (  # which loads torch
            render_jinja_template,  # pyright: ignore[reportUnknownVariableType]
        )

        variables: dict[str, Any] = {**self._variables, "strftime_now": _DATE.strftime}
        try:
            [text], _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=self._templates[name],
                **variables,
            )
        except Exception as error:  # a template can raise anything
            reason = cut(f"{type(error).__name__}: {error}", 200)
            raise CalibrationError(f"the chat template failed ({reason}). {_REMEDY}") from None
        if len(text) > _MAX_CHARACTERS:
            raise CalibrationError(f"the chat template makes more than {_MAX_CHARACTERS:,} characters. {_REMEDY}")
        return text


def read_templates(folder: Path) -> tuple[dict[str, str], dict[str, str], object]:
    """Return a folder's chat templates by name, the named special tokens they may use, and the tokenizer's class.

    Raises CalibrationError.

    chat_template.jinja comes before tokenizer_config.json's chat_template, which is one template or a list of named
    ones: `tool_use` is for conversations with tools, `default` for all others.
    """
    config_path = folder / TOKENIZER_CONFIG_NAME
    path = folder / CHAT_TEMPLATE_NAME
    with remedy(_REMEDY):
        config = read_json_file(config_path) if is_there(config_path) else {}
        found = (read_text_file(path) if is_there(path) else "") or config.get("chat_template")
    entries = cast(list[Any], found) if isinstance(found, list) else [{"name": "default", "template": found}]
    templates: dict[str, str] = {}
    for name, template in ((entry.get("name"), entry.get("template")) for entry in map(mapping_or_empty, entries)):
        if not isinstance(name, str):
            raise CalibrationError(
                f"{config_path}: chat_template has a template with the name {quoted(name)}, expected text. {_REMEDY}"
            )
        if isinstance(template, str):
            templates[name] = template
    if "default" not in templates:
        raise CalibrationError(
            f"{folder}: has no chat template, neither {CHAT_TEMPLATE_NAME} nor a chat_template in "
            f'{TOKENIZER_CONFIG_NAME}. Use lines with "text" instead of "messages".'
        )
    variables = {key: _content(config.get(key)) for key in _NAMED_TOKENS}
    return templates, {key: value for key, value in variables.items() if value}, config.get("tokenizer_class")


def _content(token: object) -> str:
    """A named token is a string, or an object with a content."""
    value = mapping_or_empty(token).get("content", token)
    return value if isinstance(value, str) else ""
