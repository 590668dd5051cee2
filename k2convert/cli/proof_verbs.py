"""The arguments and options of the verbs that measure whole models; see verbs.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from k2convert.choices import EVALUATION_TOKENS, EVALUATION_WINDOW, MAX_SEED, AskedActivations, ComputedKvCache
from k2convert.cli.options import (
    ADDRESS,
    TEXT_FORMS,
    AnyTextOption,
    DeviceOption,
    JsonOption,
    LongOption,
    MaxDiskOption,
    QuietOption,
    argument,
    check_folder,
    check_server,
    check_source,
    flag,
    option,
)


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """Measure how far whole models are from a reference, on a text. It computes all of them layer by layer. Running it
    again resumes.
    """

    reference: Annotated[
        str, argument("REFERENCE", f"The model to compare with: a folder, or {ADDRESS}.", check_source)
    ]
    checkpoints: Annotated[
        list[str],
        argument(
            "CHECKPOINT...",
            f"INT4, NVFP4 or BF16 checkpoints of the same model: folders, or {ADDRESS}.",
            check_source,
        ),
    ]
    text: Annotated[list[Path], option(f"Text: {TEXT_FORMS}. May be repeated.", "FILE")]
    tokens: Annotated[int, option("Tokens to use.", "N", min=2)] = EVALUATION_TOKENS
    window: Annotated[int, option("Tokens that are seen together.", "N", min=2)] = EVALUATION_WINDOW
    seed: Annotated[int, option("Decides which windows of the text are used.", "N", min=0, max=MAX_SEED)] = 0
    activations: Annotated[
        AskedActivations | None, option("Activations of NVFP4 weights [default: as config.json declares].")
    ] = None
    kv_cache: Annotated[
        ComputedKvCache | None, option("Round what a KV cache holds, but not the reference's [default: FP32].")
    ] = None
    device: DeviceOption = "auto"
    max_disk: MaxDiskOption = None
    out: Annotated[
        Path | None,
        option("File for all rows [default: evaluation.json in each CHECKPOINT].", "FILE", check=check_folder),
    ] = None
    replace: Annotated[bool, flag("--replace", "Replace an evaluation of something else in the file.")] = False
    long: LongOption = False
    any_text: AnyTextOption = False
    dry_run: Annotated[bool, flag("--dry-run", "Print time, memory and disk needed, and write nothing.")] = False
    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Compare the models of two servers. Both are asked for the log-probabilities of a text. Running it again resumes.

    A is the reference. vLLM must be started with --max-logprobs K; SGLang needs no option. The API key is read from
    K2CONVERT_API_KEY, and that of B from K2CONVERT_API_KEY_B if it has its own.
    """

    reference: Annotated[
        str, argument("A", "Address of a server, http://HOST:PORT/v1, or a folder that --save wrote.", check_server)
    ]
    model: Annotated[str | None, argument("[B]", "Address of the other server.", check_server)] = None
    text: Annotated[list[Path] | None, option(f"Text: {TEXT_FORMS}. May be repeated.", "FILE")] = None
    tokenizer: Annotated[
        str | None,
        option(f"Tokenizer of a text: folder of the checkpoint, or {ADDRESS}.", "CHECKPOINT", check=check_source),
    ] = None
    tokens: Annotated[int, option("Tokens to ask for.", "N", min=2)] = 8192
    window: Annotated[int, option("Tokens that are seen together; the servers must have room.", "N", min=2)] = 2048
    seed: Annotated[int, option("Decides which windows of the text are used.", "N", min=0, max=MAX_SEED)] = 0
    top_k: Annotated[
        int, option("Log-probabilities of each token. More give a better bound.", "K", min=5, max=1024)
    ] = 64
    save: Annotated[
        Path | None,
        option(
            "Folder to keep A's answers in, to compare with a B that is served later.", "FOLDER", check=check_folder
        ),
    ] = None
    model_a: Annotated[str | None, option("Which model of A, if it serves several.", "NAME")] = None
    model_b: Annotated[str | None, option("Which model of B, if it serves several.", "NAME")] = None
    requests: Annotated[int, option("Requests at a time.", "N", min=1, max=256)] = 4
    json: JsonOption = False
    quiet: QuietOption = False
