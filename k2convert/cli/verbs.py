"""The arguments and options of every verb, in the order of its help, which begins with the docstring."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer

from k2convert.choices import (
    EVALUATION_TOKENS,
    EVALUATION_WINDOW,
    MAX_SEED,
    Activations,
    AskedActivations,
    ComputedKvCache,
    Device,
    Layout,
    Rule,
    ServedKvCache,
    Target,
)
from k2convert.cli.options import (
    argument,
    check_folder,
    check_new_place,
    check_not_address,
    check_server,
    check_size,
    check_source,
    check_statistics,
    check_status_place,
    flag,
    option,
)
from k2convert.errors import quoted

TEXT_FORMS: Final = '.txt, .jsonl with "text" or "messages", or token ids in .npy or .jsonl'
ADDRESS: Final = "hf://owner/name[@revision]"
STATISTICS: Final = "a file, or hf://[datasets/]owner/name[@revision][/FILE]"
RESULT = "Source and result"
CHECKS = "Output and checks"
CALIBRATION = "Calibration"
MACHINE = "Machine"
HUB = "Hub"
"""The panels of `run --help`."""

AUTO: Final = "auto"

SourceArgument = Annotated[str, argument("SOURCE", f"Folder of the INT4 checkpoint, or {ADDRESS}.", check_source)]
ResultArgument = Annotated[
    str, argument("DEST", f"Folder of the converted checkpoint, or {ADDRESS}.", check_source)
]  # of a result that is there
JsonOption = Annotated[bool, flag("--json", "Print one JSON document on stdout, not tables.", CHECKS)]
QuietOption = Annotated[bool, flag("--quiet", "Show no progress on stderr.", CHECKS)]
SourceOption = Annotated[
    str | None, option(f"INT4 source, a folder or {ADDRESS}: measures every weight.", "SOURCE", check=check_source)
]
StatisticsOption = Annotated[
    str | None,
    option(f"Statistics that the conversion used: {STATISTICS}. Needs --source.", "FILE", check=check_statistics),
]
YesOption = Annotated[bool, flag("--yes", "Publish without asking.", HUB)]
PublicOption = Annotated[bool, flag("--public/--private", "Visibility of a new repository.", HUB)]
MaxDiskOption = Annotated[
    str | None,
    option("Disk to use at once, with the Hub: 200GB [default: free less 10 %].", "BYTES", MACHINE, check=check_size),
]


def _device(text: str) -> Device:
    """Accept a device of this machine; raises BadParameter."""
    if text not in get_args(Device):
        raise typer.BadParameter(
            f"{quoted(text)} is not auto, cpu or cuda. For what other machines take, see `k2convert guide calibrate`."
        )
    return cast(Device, text)


DeviceOption = Annotated[
    Device,
    typer.Option(
        help="What computes a text: auto, cpu or cuda.", metavar="DEVICE", rich_help_panel=MACHINE, parser=_device
    ),
]
LongOption = Annotated[bool, flag("--long", "Compute for more than 12 hours too.", MACHINE)]
AnyTextOption = Annotated[
    bool, flag("--any-text", "Evaluate on the text of a calibration too, which flatters it.", CHECKS)
]
TextOption = Annotated[list[Path], option(f"Text: {TEXT_FORMS}. May be repeated.", "FILE")]
SeedOption = Annotated[int, option("Decides which windows of the text are used.", "N", min=0, max=MAX_SEED)]
DryRunOption = Annotated[bool, flag("--dry-run", "Print time, memory and disk needed, and write nothing.")]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Convert an INT4 checkpoint to NVFP4. Running it again resumes."""

    source: SourceArgument
    destination: Annotated[
        str, argument("DEST", "Folder of the converted checkpoint, or hf://owner/name[@branch].", check_new_place)
    ]
    recipe: Annotated[
        str | None, option("A file, or a name that `recipes` lists [default: by family].", "RECIPE", RESULT)
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "Change a key of the recipe: experts=192, kv_cache=fp8, calibration.tokens=65536. May be repeated.",
            "KEY=VALUE",
            name="--set",
            panel=RESULT,
        ),
    ] = None
    rule: Annotated[
        Rule | None,
        option(
            "How weights are rounded [default: by recipe; imatrix with --statistics, gptq with --calibrate].",
            panel=RESULT,
        ),
    ] = None
    layout: Annotated[Layout | None, option("Tensor names and config of the result.", panel=RESULT)] = None
    activations: Annotated[Activations | None, option("4-bit activations, or weight-only.", panel=RESULT)] = None
    to: Annotated[
        Target | None, option("NVFP4, the dequantized BF16 copy, or INT4 as it is (with --keep-experts).", panel=RESULT)
    ] = None
    keep_experts: Annotated[
        Path | None,
        option(
            "Experts to keep: a list, a REAP report, or scores (such as statistics) with --set experts=N.",
            "FILE",
            RESULT,
        ),
    ] = None
    verify: Annotated[
        bool, flag("--verify", "Hash every finished shard again, and regenerate damaged ones.", CHECKS)
    ] = False
    dry_run: Annotated[bool, flag("--dry-run", "Print the plan and write nothing.", CHECKS)] = False
    json: JsonOption = False
    quiet: QuietOption = False
    statistics: Annotated[
        str | None, option(f"Statistics of `calibrate`: {STATISTICS}.", "FILE", CALIBRATION, check=check_statistics)
    ] = None
    calibrate: Annotated[
        list[Path] | None, option(f"Calibrate while converting, on {TEXT_FORMS}. May be repeated.", "FILE", CALIBRATION)
    ] = None
    evaluate: Annotated[
        list[Path] | None,
        option(f"Evaluate the result at the end, on {TEXT_FORMS}. May be repeated.", "FILE", CHECKS),
    ] = None
    long: LongOption = False
    any_text: AnyTextOption = False
    device: DeviceOption = "auto"
    workers: Annotated[int | None, option("Shards at a time [default: by cores and devices].", "N", MACHINE, min=1)] = (
        None
    )
    max_disk: MaxDiskOption = None
    part: Annotated[
        str | None,
        option("Convert part I of N, or that of a Slurm array (auto). Run without it at the end.", "I/N|auto", MACHINE),
    ] = None
    ray: Annotated[
        str | None, option("Convert on a Ray cluster: its address, or auto for the one here.", "ADDRESS", MACHINE)
    ] = None
    cpus_per_shard: Annotated[int, option("CPUs of each task with --ray.", "N", MACHINE, min=1)] = 4
    public: PublicOption = False
    work_dir: Annotated[
        Path | None,
        option(
            "Folder for a job that publishes to the Hub [default: k2convert-work/REPO].",
            "FOLDER",
            HUB,
            check=check_folder,
        ),
    ] = None
    yes: YesOption = False


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Collect statistics of activations on a text. It computes SOURCE layer by layer and writes STATISTICS for `run
    --statistics`. Running it again resumes.
    """

    source: SourceArgument
    statistics: Annotated[
        Path,
        argument(
            "STATISTICS",
            "Statistics file to write. Until it is complete, the work is in STATISTICS.work.",
            check_folder,
        ),
    ]
    text: TextOption
    tokens: Annotated[
        int | None, option("Tokens to use [default: 2 for each input of an expert, at least 131072].", "N", min=1)
    ] = None
    window: Annotated[int, option("Tokens that are seen together.", "N", min=1)] = 2048
    seed: SeedOption = 0
    device: DeviceOption = "auto"
    max_disk: MaxDiskOption = None
    long: LongOption = False
    dry_run: DryRunOption = False
    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """Check a converted checkpoint and measure its error. It checks the servable contract, every weight, and MoE
    layers on request. Exit code 3 if it fails.
    """

    destination: ResultArgument
    source: SourceOption = None
    layers: Annotated[
        str | None,
        option("MoE layers to compute: 1,30,60 or all. From hf:// only these are read. Needs --source.", "LAYERS"),
    ] = None
    hidden_states: Annotated[
        Path | None, option("Captured hidden states for --layers [default: synthetic].", "FILE")
    ] = None
    text: Annotated[
        list[Path] | None,
        option(f"Text for --layers ({TEXT_FORMS}): the source's layers below are computed on it.", "FILE"),
    ] = None
    tokens: Annotated[int, option("Tokens to compute layers on.", "N", min=1)] = 256
    reference: Annotated[bool, flag("--reference", "Decode with the quantization libraries too.")] = False
    statistics: StatisticsOption = None
    against: Annotated[
        Path | None,
        option(
            "Folder of another NVFP4 checkpoint of the same source, to measure it too. Needs --source.",
            "FOLDER",
            check=check_source,
        ),
    ] = None
    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Write a report as page, Markdown and picture. The files are report.html, report.md and report.png."""

    destination: ResultArgument
    source: SourceOption = None
    statistics: StatisticsOption = None
    validation: Annotated[
        Path | None, option("Output of `validate --json`, to show it instead of reading the shards again.", "FILE")
    ] = None
    out: Annotated[
        Path | None, option("Folder to write to [default: DEST, or . for hf://].", "FOLDER", check=check_new_place)
    ] = None
    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """Validate a converted checkpoint and publish it on the Hub. It makes one commit, on main or a branch."""

    folder: Annotated[Path, argument("FOLDER", "Folder of the converted checkpoint.", check_folder)]
    repo: Annotated[str, option("Repository to publish on.", "owner/name[@branch]", check=check_not_address)]
    public: PublicOption = False
    yes: YesOption = False
    base_model: Annotated[
        str | None,
        option(
            "Repository of the INT4 source, for the card and its license [default: the ledger's].",
            "owner/name",
            check=check_not_address,
        ),
    ] = None
    source: SourceOption = None
    statistics: StatisticsOption = None
    json: JsonOption = False
    quiet: QuietOption = False


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Describe a checkpoint, from its headers, or a statistics file."""

    source: Annotated[
        str, argument("SOURCE", f"Folder of a checkpoint, {ADDRESS}, or a statistics file.", check_source)
    ]
    json: JsonOption = False


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Show how far a conversion or a calibration is. For a finished one: where it was published."""

    destination: Annotated[
        str,
        argument(
            "DEST", f"Folder of a conversion, statistics file of a calibration, or {ADDRESS}.", check_status_place
        ),
    ]
    json: JsonOption = False


def _check_experts(text: str) -> None:
    if text != AUTO and not (text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise typer.BadParameter(f"{quoted(text)} is not a number of experts. Pass one such as 192, or auto.")


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Show which GPUs hold a checkpoint, and with how much KV cache. Only headers are read. Exit code 3 if it does not
    fit.
    """

    checkpoint: Annotated[
        str,
        argument(
            "CHECKPOINT", f"Folder or {ADDRESS}: an INT4 source, as it would be converted, or a result.", check_source
        ),
    ]
    gpu: Annotated[str | None, option("Kind of GPU: b200, h200, rtx-pro-6000 ...", "GPU")] = None
    memory: Annotated[str | None, option("Memory of one GPU, instead of --gpu: 96GB.", "BYTES", check=check_size)] = (
        None
    )
    count: Annotated[int | None, option("Number of GPUs.", "N", min=1, max=1024)] = None
    tp: Annotated[int | None, option("GPUs that hold each layer together.", "N", min=1)] = None
    ep: Annotated[int | None, option("GPUs that whole experts are given to.", "N", min=1)] = None
    pp: Annotated[int | None, option("Stages that hold the layers one after another.", "N", min=1)] = None
    dp_attention: Annotated[bool, flag("--dp-attention", "Each GPU has its own requests.")] = False
    dcp: Annotated[int, option("GPUs of --tp that divide the KV cache.", "N", min=1)] = 1
    kv: Annotated[ServedKvCache | None, option("KV cache [default: as config.json declares, else bf16].")] = None
    context: Annotated[int | None, option("Tokens of one request, with its answer [default: 8192].", "N", min=1)] = None
    requests: Annotated[int, option("Requests at a time.", "N", min=1)] = 1
    utilization: Annotated[
        float, option("Share of the memory that the engine may use.", "SHARE", min=0.01, max=1.0)
    ] = 0.92
    overhead: Annotated[
        str, option("Memory for activations, CUDA graphs and NCCL on each GPU.", "BYTES", check=check_size)
    ] = "3GB"
    experts: Annotated[
        str | None,
        option(
            "Experts per layer if it is pruned; auto: the most that fit on --count GPUs.",
            "N|auto",
            check=_check_experts,
        ),
    ] = None
    estimate: Annotated[
        bool, flag("--estimate", "Ask AIConfigurator for the speed (pip install 'k2convert[fit]').")
    ] = False
    json: JsonOption = False


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
    text: TextOption
    tokens: Annotated[int, option("Tokens to use.", "N", min=2)] = EVALUATION_TOKENS
    window: Annotated[int, option("Tokens that are seen together.", "N", min=2)] = EVALUATION_WINDOW
    seed: SeedOption = 0
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
    dry_run: DryRunOption = False
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
    seed: SeedOption = 0
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
