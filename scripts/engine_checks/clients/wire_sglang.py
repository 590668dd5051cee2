"""Reads the questions of compare_servers with SGLang's own class, and lets SGLang's own code write the answer with the
log-probabilities of model_server's, which must be the same: `wire_sglang DOCUMENTS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.engine_checks.clients import sglang_on_cpu


def main() -> int:
    sglang_on_cpu.enable()
    from sglang.srt.entrypoints.openai.protocol import ModelList
    from sglang.srt.managers.io_struct import GenerateReqInput

    documents = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    question = GenerateReqInput(**documents["question"])
    question.normalize_batch_and_arguments()
    wanted = documents["answer"]["meta_info"]
    found = json.loads(json.dumps(meta_information(question, wanted)))
    problems = [
        f"{key}: not as SGLang writes it"
        for key in ("input_token_logprobs", "input_top_logprobs")
        if found[key] != wanted[key]
    ]
    cards = ModelList.model_validate(documents["models"]).model_dump()["data"]
    problems += [
        f"models: not as SGLang writes them: {card}" for card in cards if card not in documents["models"]["data"]
    ]
    print("\n".join(problems))
    return 1 if problems else 0


def meta_information(question: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what TokenizerManager makes of the same numbers."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    tokens = wanted["input_token_logprobs"]
    tops = [row or [] for row in wanted["input_top_logprobs"]]
    manager = TokenizerManager.__new__(TokenizerManager)
    kinds = [f"{side}_{name}" for side in ("input", "output") for name in ("token_logprobs", "top_logprobs")]
    empty: dict[str, list[Any]] = {f"{kind}{part}": [] for kind in kinds for part in ("", "_val", "_idx")}
    state = SimpleNamespace(**empty, obj=question)
    state.input_token_logprobs_val = [token[0] for token in tokens]
    state.input_token_logprobs_idx = [token[1] for token in tokens]
    state.input_top_logprobs_val = [[entry[0] for entry in row] for row in tops]
    state.input_top_logprobs_idx = [[entry[1] for entry in row] for row in tops]
    found: dict[str, Any] = {}
    manager.add_logprob_to_meta_info(
        found, state, question.top_logprobs_num, None, question.return_text_in_logprobs, finished=True
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
