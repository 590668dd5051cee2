"""The arguments and options of every verb, in the order of its help, which begins with the docstring."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from k2convert.choices import (
    MAX_SEED,
    Activations,
    Layout,
    Rule,
    ServedKvCache,
    Target,
)
from k2convert.cli.options import (
    ADDRESS,
    CALIBRATION,
    CHECKS,
    HUB,
    MACHINE,
    RESULT,
    STATISTICS,
    TEXT_FORMS,
    AnyTextOption,
    DeviceOption,
    JsonOption,
    LongOption,
    MaxDiskOption,
    PublicOption,
    QuietOption,
    ResultArgument,
    SourceArgument,
    SourceOption,
    StatisticsOption,
    YesOption,
    argument,
    check_folder,
    check_new_place,
    check_not_address,
    check_size,
    check_source,
    check_statistics,
    check_status_place,
    flag,
    option,
)
from k2convert.errors import quoted

AUTO: Final = "auto"


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
    text: Annotated[list[Path], option(f"Text: {TEXT_FORMS}. May be repeated.", "FILE")]
    tokens: Annotated[
        int | None, option("Tokens to use [default: 2 for each input of an expert, at least 131072].", "N", min=1)
    ] = None
    window: Annotated[int, option("Tokens that are seen together.", "N", min=1)] = 2048
    seed: Annotated[int, option("Decides which windows of the text are used.", "N", min=0, max=MAX_SEED)] = 0
    device: DeviceOption = "auto"
    max_disk: MaxDiskOption = None
    long: LongOption = False
    dry_run: Annotated[bool, flag("--dry-run", "Print time, memory and disk needed, and write nothing.")] = False
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
