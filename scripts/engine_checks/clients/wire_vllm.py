"""Reads compare_servers' questions and model_server's answers with vLLM's own classes: `wire_vllm DOCUMENTS`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel


def main() -> int:
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
    from vllm.entrypoints.serve.engine.protocol import ModelList

    documents = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    problems: list[str] = []
    for name, kind in (("question", CompletionRequest), ("answer", CompletionResponse), ("models", ModelList)):
        read = kind.model_validate(documents[name])
        problems += [f"{name}: vLLM knows no field {field}" for field in unknown(read)]
        if name == "answer" and read.model_dump(mode="json") != documents[name]:
            problems.append("the answer is not as vLLM writes it")
    print("\n".join(problems))
    return 1 if problems else 0


def unknown(model: BaseModel) -> Iterator[str]:
    """Yield the fields that no class of vLLM has."""
    yield from model.model_extra or {}
    for value in vars(model).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                yield from unknown(part)


if __name__ == "__main__":
    sys.exit(main())
