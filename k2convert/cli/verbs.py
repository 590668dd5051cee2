"""The arguments and options of every verb, in the order of its help, which begins with the docstring."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast, get_args

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
    REQUIRED,
    argument,
    check_folder,
    check_new_place,
    check_not_address,
    check_size,
    check_source,
    check_status_place,
    flag,
    option,
)
from k2convert.errors import quoted

TEXT_FORMS: Final = '.txt, .jsonl with "text" or "messages", or token ids in .npy or .jsonl'
ADDRESS: Final = "hf://owner/name[@revision]"
RESULT = "Source and result"
CHECKS = "Output and checks"
CALIBRATION = "Calibration"
MACHINE = "Machine"
HUB = "Hub"  # the panels of `run --help`

AUTO: Final = "auto"

source_argument = partial(argument, "SOURCE", f"Folder of the INT4 checkpoint, or {ADDRESS}.", check_source)
result_argument = partial(argument, "DEST", f"Folder of the converted checkpoint, or {ADDRESS}.", check_source)
json_option = partial(flag, "--json", "Print one JSON document on stdout, not tables.", CHECKS)
quiet_option = partial(flag, "--quiet", "Show no progress on stderr.", CHECKS)
source_option = partial(
    option, f"INT4 source, a folder or {ADDRESS}: measures every weight.", "SOURCE", check=check_source
)
yes_option = partial(flag, "--yes", "Publish without asking.", HUB)
public_option = partial(flag, "--public/--private", "Visibility of a new repository.", HUB)
max_disk_option = partial(
    option, "Disk to use at once, with the Hub: 200GB [default: free less 10 %].", "BYTES", MACHINE, check=check_size
)


def _device(text: str) -> Device:
    if text not in get_args(Device):
        raise typer.BadParameter(
            f"{quoted(text)} is not auto, cpu or cuda. For what other machines take, see `k2convert guide calibrate`."
        )
    return cast(Device, text)


device_option = partial(
    option, "What computes a text: auto, cpu or cuda.", "DEVICE", MACHINE, parser=_device, default="auto"
)
any_text_option = partial(flag, "--any-text", "Evaluate on the text of a calibration too, which flatters it.", CHECKS)
text_option = partial(option, f"Text: {TEXT_FORMS}. May be repeated.", "FILE", default=REQUIRED)
seed_option = partial(option, "Decides which windows of the text are used.", "N", min=0, max=MAX_SEED, default=0)
dry_run_option = partial(flag, "--dry-run", "Print the memory and the disk needed, and write nothing.")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Convert an INT4 checkpoint to NVFP4. Running it again resumes."""

    source: str = source_argument()
    destination: str = argument(
        "DEST", "Folder of the converted checkpoint, or hf://owner/name[@branch].", check_new_place
    )
    recipe: str | None = option("A file, or a name that `recipes` lists [default: by family].", "RECIPE", RESULT)
    settings: list[str] | None = option(
        "Change a key of the recipe: smoothing=false, kv_cache=fp8, calibration.tokens=65536. May be repeated.",
        "KEY=VALUE",
        name="--set",
        panel=RESULT,
    )
    rule: Rule | None = option("How weights are rounded [default: by recipe; gptq with --calibrate].", panel=RESULT)
    layout: Layout | None = option("Tensor names and config of the result.", panel=RESULT)
    activations: Activations | None = option("4-bit activations, or weight-only.", panel=RESULT)
    to: Target | None = option("NVFP4, or the dequantized BF16 copy.", panel=RESULT)
    verify: bool = flag("--verify", "Hash every finished shard, and convert damaged ones again.", CHECKS)
    dry_run: bool = flag("--dry-run", "Print the plan and write nothing.", CHECKS)
    json: bool = json_option()
    quiet: bool = quiet_option()
    calibrate: list[Path] | None = option(
        f"Calibrate while converting, on {TEXT_FORMS}. May be repeated.", "FILE", CALIBRATION
    )
    evaluate: list[Path] | None = option(
        f"Evaluate the result at the end, on {TEXT_FORMS}. May be repeated.", "FILE", CHECKS
    )
    any_text: bool = any_text_option()
    device: Device = device_option()
    workers: int | None = option("Shards at a time [default: by cores and devices].", "N", MACHINE, min=1)
    max_disk: str | None = max_disk_option()
    part: str | None = option(
        "Convert part I of N, or that of a Slurm array (auto). Run without it at the end.", "I/N|auto", MACHINE
    )
    ray: str | None = option("Convert on a Ray cluster: its address, or auto for the one here.", "ADDRESS", MACHINE)
    cpus_per_shard: int = option("CPUs of each task with --ray.", "N", MACHINE, min=1, default=4)
    public: bool = public_option()
    work_dir: Path | None = option(
        "Folder for a job that publishes to the Hub [default: k2convert-work/REPO].", "FOLDER", HUB, check=check_folder
    )
    yes: bool = yes_option()


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """Copy a checkpoint with some experts of each MoE layer. The copy is a source like any other. Running it again
    resumes.
    """

    source: Path = argument("SOURCE", "Folder of the INT4 or MXFP4 checkpoint.", check_folder)
    destination: Path = argument("DEST", "Folder of the copy.", check_folder)
    keep: Path = option("Experts to keep: a list, or a REAP report of llm-compressor.", "FILE", default=REQUIRED)
    dry_run: bool = flag("--dry-run", "Print what would be kept and the disk needed, and write nothing.")
    json: bool = json_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """Check a converted checkpoint and measure its error. It checks the servable contract, every weight, and MoE
    layers on request. Exit code 3 if it fails.
    """

    destination: str = result_argument()
    source: str | None = source_option()
    layers: str | None = option(
        "MoE layers to compute: 1,30,60 or all. From hf:// only these are read. Needs --source.", "LAYERS"
    )
    hidden_states: Path | None = option("Captured hidden states for --layers [default: synthetic].", "FILE")
    text: list[Path] | None = option(
        f"Text for --layers ({TEXT_FORMS}): the source's layers below are computed on it.", "FILE"
    )
    tokens: int = option("Tokens to compute layers on.", "N", min=1, default=256)
    reference: bool = flag("--reference", "Decode with the quantization libraries too.")
    against: Path | None = option(
        "Folder of another NVFP4 checkpoint of the same source, to measure it too. Needs --source.",
        "FOLDER",
        check=check_source,
    )
    json: bool = json_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Write a report as page, Markdown and picture. The files are report.html, report.md and report.png."""

    destination: str = result_argument()
    source: str | None = source_option()
    validation: Path | None = option(
        "Output of `validate --json`, to show it instead of reading the shards again.", "FILE"
    )
    out: Path | None = option("Folder to write to [default: DEST, or . for hf://].", "FOLDER", check=check_new_place)
    json: bool = json_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True)
class PublishOptions:
    """Validate a converted checkpoint and publish it on the Hub. It makes one commit, on main or a branch."""

    folder: Path = argument("FOLDER", "Folder of the converted checkpoint.", check_folder)
    repo: str = option("Repository to publish on.", "owner/name[@branch]", check=check_not_address, default=REQUIRED)
    public: bool = public_option()
    yes: bool = yes_option()
    base_model: str | None = option(
        "Repository of the INT4 source, for the card and its license [default: the ledger's].",
        "owner/name",
        check=check_not_address,
    )
    source: str | None = source_option()
    json: bool = json_option()
    quiet: bool = quiet_option()


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """Describe a checkpoint, from its headers."""

    source: str = argument("SOURCE", f"Folder of a checkpoint, or {ADDRESS}.", check_source)
    json: bool = json_option()


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Show how far a conversion is. For a finished one: where it was published."""

    destination: str = argument(
        "DEST", f"Folder of a conversion, file of an evaluation, or {ADDRESS}.", check_status_place
    )
    json: bool = json_option()


@dataclass(frozen=True, slots=True)
class RecipesOptions:
    """List the recipes that come with k2convert."""

    json: bool = json_option()


@dataclass(frozen=True, slots=True)
class GuideOptions:
    """Show the manual: a list of its pages, or the page of a topic."""

    topic: str | None = argument("[TOPIC]", "Topic of a page.", None, default=None)


def _check_experts(text: str) -> None:
    if text != AUTO and not (text.isdecimal() and 0 < len(text) < 10 and int(text)):
        raise typer.BadParameter(f"{quoted(text)} is not a number of experts. Pass one such as 192, or auto.")


@dataclass(frozen=True, slots=True)
class FitOptions:
    """Show which GPUs hold a checkpoint, and with how much KV cache. Only headers are read. Exit code 3 if it does not
    fit.
    """

    checkpoint: str = argument(
        "CHECKPOINT", f"Folder or {ADDRESS}: an INT4 source, as it would be converted, or a result.", check_source
    )
    gpu: str | None = option("Kind of GPU: b200, h200, rtx-pro-6000 ...", "GPU")
    memory: str | None = option("Memory of one GPU, instead of --gpu: 96GB.", "BYTES", check=check_size)
    count: int | None = option("Number of GPUs.", "N", min=1, max=1024)
    tp: int | None = option("GPUs that hold each layer together.", "N", min=1)
    ep: int | None = option("GPUs that whole experts are given to.", "N", min=1)
    pp: int | None = option("Stages that hold the layers one after another.", "N", min=1)
    dp_attention: bool = flag("--dp-attention", "Each GPU has its own requests.")
    kv: ServedKvCache | None = option("KV cache [default: as config.json declares, else bf16].")
    context: int | None = option("Tokens of one request, with its answer [default: 8192].", "N", min=1)
    requests: int = option("Requests at a time.", "N", min=1, default=1)
    utilization: float = option(
        "Share of the memory that the engine may use.", "SHARE", min=0.01, max=1.0, default=0.92
    )
    overhead: str = option(
        "Memory for activations, CUDA graphs and NCCL on each GPU.", "BYTES", check=check_size, default="3GB"
    )
    experts: str | None = option(
        "Experts per layer if it is pruned; auto: the most that fit on --count GPUs.", "N|auto", check=_check_experts
    )
    json: bool = json_option()


@dataclass(frozen=True, slots=True)
class EvaluateOptions:
    """Measure how far whole models are from a reference, on a text. It computes all of them layer by layer. Running it
    again resumes.
    """

    reference: str = argument("REFERENCE", f"The model to compare with: a folder, or {ADDRESS}.", check_source)
    checkpoints: list[str] = argument(
        "CHECKPOINT...", f"INT4, NVFP4 or BF16 checkpoints of the same model: folders, or {ADDRESS}.", check_source
    )
    text: list[Path] = text_option()
    tokens: int = option("Tokens to use.", "N", min=2, default=EVALUATION_TOKENS)
    window: int = option("Tokens that are seen together.", "N", min=2, default=EVALUATION_WINDOW)
    seed: int = seed_option()
    activations: AskedActivations | None = option("Activations of NVFP4 weights [default: as config.json declares].")
    kv_cache: ComputedKvCache | None = option("Round what a KV cache holds, but not the reference's [default: FP32].")
    device: Device = device_option()
    max_disk: str | None = max_disk_option()
    out: Path | None = option(
        "File for all rows [default: evaluation.json in each CHECKPOINT].", "FILE", check=check_folder
    )
    replace: bool = flag("--replace", "Replace an evaluation of something else in the file.")
    any_text: bool = any_text_option()
    dry_run: bool = dry_run_option()
    json: bool = json_option()
    quiet: bool = quiet_option()
