"""Conversations to text: the chat template of a source folder, rendered by chat_process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self, cast

from k2convert.checkpoint.files import is_there, mapping_or_empty, read_json_file, read_text_file
from k2convert.checkpoint.names import CHAT_TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from k2convert.errors import CalibrationError, cut, quoted, remedy

MAX_SECONDS: Final = 10.0
"""Processor time for a conversation. Kimi's template needs a few milliseconds."""

_NAMED_TOKENS: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_KIMI_TOKENIZER: Final = "TikTokenTokenizer"
"""The class of Kimi's tokenizers. Their code sorts the keys of tools before the template gets them."""
_TYPESCRIPT: Final = "tools_ts_str"
"""The variable in which the code of K2.5's tokenizer, 480 lines that are not run, gives its template the tools."""
_REMEDY: Final = 'Use lines with "text", or a checkpoint with a working chat template.'


class ChatTemplate:
    """The chat template of a folder. The process that renders starts with the first conversation; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None
        self._needs_typescript = self._sorts_tools = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def render(self, messages: list[Any], tools: list[Any] | None) -> str:
        """Return a conversation as the model sees it, as transformers' apply_chat_template does.

        Raises CalibrationError if there is no template, or it fails or takes too long.
        """
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        if tools and self._needs_typescript:
            raise CalibrationError(
                "this checkpoint declares tools in TypeScript, which only its own code writes, and that is not run. "
                "Leave out conversations with tools, or pass token ids (.npy, .jsonl)."
            )
        if tools and self._sorts_tools:
            tools = json.loads(json.dumps(tools, sort_keys=True))
        chat = {"messages": messages, "tools": tools, "add_generation_prompt": False}
        try:
            process.stdin.write(json.dumps(chat) + "\n")
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            is_late = -(code := process.wait()) == signal.SIGPROF
            ended = f"did not finish in {MAX_SECONDS:g} seconds" if is_late else f"ended its process (code {code})"
            raise CalibrationError(f"the chat template {ended}. {_REMEDY}")
        answer: dict[str, str] = json.loads(reply)
        if "error" in answer:
            raise CalibrationError(f"the chat template failed ({cut(answer['error'], 200)}). {_REMEDY}")
        return answer["text"]

    def _start(self) -> subprocess.Popen[str]:
        templates, variables, tokenizer = read_templates(self._folder)
        self._needs_typescript = any(_TYPESCRIPT in template for template in templates.values())
        self._sorts_tools = tokenizer == _KIMI_TOKENIZER
        program = Path(__file__).with_name("chat_process.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"templates": templates, "variables": variables, "seconds": MAX_SECONDS}) + "\n")
        return process


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
