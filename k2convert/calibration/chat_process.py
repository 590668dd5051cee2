"""Renders conversations in a process of its own: standard input and output have a JSON document a line.

The template comes from the checkpoint, and a template is a program. It runs in jinja2's immutable sandbox, with what
transformers offers it and nothing else. The sandbox bounds neither time nor memory, so the operating system does: a
conversation gets some seconds of processor time, the process gets 1 GiB and can open no file. Imports the standard
library and jinja2 only, so that it starts fast.

First line in: {"templates", "variables", "seconds"}. Then, a line a conversation, {"messages", "tools"} in and {"text"}
or {"error"} out.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.debug  # imported when a template fails; no file can be opened by then  # pyright: ignore[reportUnusedImport]
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES: Final = 1 << 30
MAX_CHARACTERS: Final = 64 << 20
DATE: Final = "2026-01-01"


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks what the assistant says, for training. It adds nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own form

    def parse(self, parser: Parser) -> Node:
        """Parse the block as a call that gives its content."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template as transformers does; raises jinja2.TemplateError.

    strftime_now tells a fixed date, so that the same text gives the same tokens on every day.
    """

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    functions = {"raise_exception": raise_exception, "strftime_now": datetime.fromisoformat(DATE).strftime}
    return environment.from_string(source, globals=functions)


def main() -> None:
    """Read the template, then answer a conversation a line until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command that started this process
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    job = json.loads(sys.stdin.readline())
    compiled: dict[str, jinja2.Template] = {}
    for line in sys.stdin:
        chat = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # its signal ends the process
        try:
            name = "default"
            if chat["tools"] is not None and "tool_use" in job["templates"]:
                name = "tool_use"
            template = compiled[name] = compiled.get(name) or compile_template(job["templates"][name])
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
            text = template.render(**job["variables"] | chat | {"documents": None})
            if len(text) > MAX_CHARACTERS:
                raise ValueError(f"more than {MAX_CHARACTERS:,} characters")
            reply = json.dumps({"text": text})
        except Exception as error:
            reply = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
