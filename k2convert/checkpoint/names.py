"""The name of every file and folder that k2convert reads or writes by name. Nothing else spells them."""

from pathlib import Path
from typing import Final

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_SHARD_NAME: Final = "model.safetensors"
SHARD_SUFFIX: Final = ".safetensors"
HF_QUANT_CONFIG_NAME: Final = "hf_quant_config.json"
CARD_NAME: Final = "README.md"
IGNORE_NAME: Final = ".gitignore"
LOST_FOUND: Final = "lost+found"
"""In the top folder of a file system. Only its administrator may read it."""

TOKENIZER_NAME: Final = "tokenizer.json"
TIKTOKEN_NAME: Final = "tiktoken.model"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
PROCESSOR_NAMES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
CHAT_TEMPLATE_NAME: Final = "chat_template.jinja"
TOKENIZER_FILES: Final = (TOKENIZER_NAME, TIKTOKEN_NAME, TOKENIZER_CONFIG_NAME, CHAT_TEMPLATE_NAME)
"""The files by which a text is read."""

LEDGER_NAME: Final = "k2convert.json"
EVALUATION_NAME: Final = "evaluation.json"
REPORT_PAGE_NAME: Final = "report.html"
REPORT_TEXT_NAME: Final = "report.md"
REPORT_PICTURE_NAME: Final = "report.png"

WORK_FOLDER: Final = ".k2convert"  # in the destination; the names below are in it
JOB_NAME: Final = "job.json"
COMMAND_NAME: Final = "command.json"
PRUNE_NAME: Final = "prune.json"
LOCK_NAME: Final = "lock"
PUBLISHED_NAME: Final = "published.json"
DONE_FOLDER: Final = "done"
DOWNLOADS_FOLDER: Final = "download"
SOURCE_COPY_FOLDER: Final = "source"

CALIBRATION_WORK: Final = (
    "calibration"  # with WORK_SUFFIX, the folder in which a conversion by rule gptq keeps its layers
)

WORK_SUFFIX: Final = ".work"
"""Suffix: the name of a file and this are the work folder of its pass. The name below is in it."""
CALIBRATION_JOB_NAME: Final = "calibration.json"

BLOBS_FOLDER: Final = "blobs"
"""In the Hub's cache: CACHE/models--OWNER--NAME/snapshots/COMMIT/FILE is a link to models--OWNER--NAME/blobs/HASH."""
SNAPSHOTS: Final = "snapshots"
_CACHED_MODEL: Final = "models--"


def model_name(folder: Path) -> str:
    """Return the name of a model's folder; in the Hub's cache, where that is a commit, the repository's."""
    folder = folder.resolve()
    repo = folder.parent.parent.name
    if folder.parent.name == SNAPSHOTS and repo.startswith(_CACHED_MODEL):
        return repo.rpartition("--")[2]
    return folder.name
