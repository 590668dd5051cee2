"""A small tokenizer in the files of Kimi's checkpoints: tiktoken.model and tokenizer_config.json."""

import base64
import json
from pathlib import Path

SPECIAL = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|im_system|>": 10,
    "<|im_middle|>": 17,
    "<think>": 22,
    "</think>": 23,
}
"""Names and their distance from the end of the ranks, as in Kimi-K2's tokenizer_config.json."""


def write_kimi_files(folder: Path, tokens: list[bytes], **config: object) -> Path:
    """Write a tokenizer whose tokens are the 256 bytes and `tokens`, in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = [bytes([i]) for i in range(256)] + tokens
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {str(len(ranks) + i): {"content": name, "special": name[0] != "t"} for name, i in SPECIAL.items()}
    document = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return folder
