"""The options of the commands: their choices, types and help texts."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast, get_type_hints

import typer

from k2convert.checkpoint.names import WORK_SUFFIX
from k2convert.choices import MAX_SEED, Activations, Device, KvCache, Layout, QuantizerKind, Rule, Target
from k2convert.errors import PlanError

T = TypeVar("T")

TOKENS: Final = 131_072
WINDOW: Final = 2048
TEXT_FORMS: Final = '.txt; .jsonl with "text", or with "messages" and "tools" for the chat template'


def existing_place(value: Any) -> Any:
    """Callback of an argument that names a folder, a file or a repository to read: check its spelling."""
    from k2convert.job.spelling import check_source

    return _checked(value, check_source)


def statistics_place(value: Any) -> Any:
    """Callback of --statistics: check the spelling of an address."""
    if value is not None and str(value).startswith("hf://"):
        from k2convert.hub.named_file import parse_file_address

        parse_file_address(value)
    return value


def status_place(value: Any) -> Any:
    """Callback of `status`: the statistics file of an unfinished calibration is not there yet, but its folder is."""
    return value if Path(f"{value}{WORK_SUFFIX}").is_dir() else existing_place(value)


def new_place(value: Any) -> Any:
    """Callback of an argument that names a place to write to."""
    from k2convert.job.spelling import check_new_place

    return _checked(value, check_new_place)


def not_address(value: Any) -> Any:
    """Callback of an argument that names a repository, with or without hf://."""
    from k2convert.job.spelling import check_not_address

    return _checked(value, check_not_address)


def local_folder(value: Any) -> Any:
    """Callback of an argument that can only name a folder."""
    from k2convert.job.spelling import check_folder

    return _checked(value, check_folder)


def _checked(value: Any, check: Callable[[str], None]) -> Any:
    if value is not None:
        check(str(value))
    return value


def _input_scale(value: float | None) -> float | None:
    if value is not None:
        from k2convert.plan.recipe import input_scale_problem

        if problem := input_scale_problem(value):
            raise typer.BadParameter(f"{value:g}: {problem}")
    return value


def size_option(text: str | None) -> str | None:
    """Callback of an option that is a size: check its spelling."""
    if text is not None:
        try:
            parse_size(text)
        except PlanError as error:
            raise typer.BadParameter(str(error)) from None
    return text


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of tables.")]
SourceArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of the INT4 checkpoint, or hf://owner/name[@revision].",
        callback=existing_place,
        show_default=False,
    ),
]
InspectedArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Folder of a checkpoint, hf://owner/name[@revision], or a statistics file of `calibrate`.",
        callback=existing_place,
        show_default=False,
    ),
]
DestinationArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of the converted checkpoint, or hf://owner/name[@revision].",
        callback=existing_place,
        show_default=False,
    ),
]
StatusArgument = Annotated[
    str,
    typer.Argument(
        metavar="DESTINATION",
        help="Folder of a conversion, statistics file of a calibration, or hf://owner/name[@revision].",
        callback=status_place,
        show_default=False,
    ),
]
FolderArgument = Annotated[
    Path, typer.Argument(help="Folder of the converted checkpoint.", callback=local_folder, show_default=False)
]
ResultArgument = Annotated[
    str,
    typer.Argument(
        help="Folder of the converted checkpoint, or hf://owner/name[@branch].", callback=new_place, show_default=False
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Show no progress on stderr.")]
SourceOption = Annotated[
    str | None,
    typer.Option(
        help="The INT4 source, a folder or hf://owner/name[@revision]: measures every weight, compares copies.",
        callback=existing_place,
    ),
]
StatisticsOption = Annotated[
    str | None,
    typer.Option(
        help="Statistics of the conversion, to regenerate weighted results: a file, or "
        "hf://[datasets/]owner/name[@revision][/FILE]. Needs --source.",
        metavar="FILE",
        callback=statistics_place,
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option(help="Branch of the repository to publish on, as @branch in its address.", metavar="BRANCH"),
]
PublicOption = Annotated[bool, typer.Option("--public/--private", help="Visibility of a new repository.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Publish without asking.")]
MaxDiskOption = Annotated[
    str | None,
    typer.Option(help="Disk to use at one time, with the Hub: 200GB [default: free less 10 %].", callback=size_option),
]

GpuOption = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: compute what one GPU of this kind would take, such as h200.", show_default=False
    ),
]
CoresOption = Annotated[
    int | None,
    typer.Option(min=1, help="With --dry-run: compute what so many CPU cores would take.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Arguments and options of `run`, in the order of its help."""

    source: SourceArgument
    destination: ResultArgument
    recipe: Annotated[str | None, typer.Option(help="Recipe: a file, or a shipped name. Default: by family.")] = None
    rule: Annotated[
        Rule | None,
        typer.Option(
            help="How weights are rounded [default: by recipe; weighted with --statistics, feedback with --calibrate]."
        ),
    ] = None
    layout: Annotated[Layout | None, typer.Option(help="Tensor names and config of the result.")] = None
    activations: Annotated[Activations | None, typer.Option(help="4-bit activations, or weight-only.")] = None
    quantizer: Annotated[
        QuantizerKind | None, typer.Option(help="Own arithmetic, or compressed-tensors followed by ModelOpt.")
    ] = None
    statistics: Annotated[
        str | None,
        typer.Option(
            help="Statistics of `calibrate`, for rule weighted and norm scaling: a file, or "
            "hf://[datasets/]owner/name[@revision][/FILE].",
            metavar="FILE",
            callback=statistics_place,
        ),
    ] = None
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help=f"Text for rule feedback: {TEXT_FORMS}. May be repeated.", show_default=False),
    ] = None
    token_ids: Annotated[
        list[Path] | None,
        typer.Option(help="Token ids instead of text: .npy or .jsonl. May be repeated.", show_default=False),
    ] = None
    tokens: Annotated[int | None, typer.Option(min=1, help=f"Tokens of the text to use [default: {TOKENS}].")] = None
    window: Annotated[int | None, typer.Option(min=1, help=f"Tokens seen together [default: {WINDOW}].")] = None
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="Decides which windows are used [default: 0].")
    ] = None
    save_statistics: Annotated[
        Path | None,
        typer.Option(help="Write the statistics that --calibrate collects, as `calibrate` does.", show_default=False),
    ] = None
    norm_scaling: Annotated[
        bool | None,
        typer.Option(
            "--norm-scaling/--no-norm-scaling",
            help="Exact scaling of channels by statistics or text [default: on for w4a4].",
        ),
    ] = None
    keep_experts: Annotated[
        Path | None,
        typer.Option(
            help="Experts to keep: a list, a REAP report, or scores (statistics of `calibrate`) with --experts.",
            show_default=False,
        ),
    ] = None
    experts: Annotated[
        int | None, typer.Option(min=1, help="How many experts a layer to keep, by the scores of --keep-experts.")
    ] = None
    to: Annotated[
        Target | None,
        typer.Option(
            "--to", "--target", help="NVFP4, only the dequantized BF16 copy, or INT4 as it is (for --keep-experts)."
        ),
    ] = None
    kv_cache: Annotated[KvCache | None, typer.Option(help="Declare an FP8 KV cache in the config.")] = None
    input_scale: Annotated[
        float | None,
        typer.Option(help="Constant activation scale of gate and up [default: 1.0].", callback=_input_scale),
    ] = None
    down_input_scale: Annotated[
        float | None,
        typer.Option(help="Constant activation scale of down [default: as --input-scale].", callback=_input_scale),
    ] = None
    workers: Annotated[int | None, typer.Option(min=1, help="Shards at a time [default: by cores and devices].")] = None
    device: Annotated[Device, typer.Option(help="Where to convert.")] = "auto"
    max_disk: MaxDiskOption = None
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a job that publishes to the Hub [default: k2convert-work/REPO].", callback=local_folder
        ),
    ] = None
    public: PublicOption = False
    revision: RevisionOption = None
    yes: Annotated[
        bool, typer.Option("--yes", help="Publish without asking; calibrate for more than 12 hours too.")
    ] = False
    part: Annotated[
        str | None,
        typer.Option(
            help="Convert one part of the shards: 3/8, or from Slurm's array variables. Run without it at the end.",
            metavar="[I/N]",
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(help="Convert on a Ray cluster: its address, or auto for the one here.", metavar="ADDRESS"),
    ] = None
    cpus_per_shard: Annotated[int, typer.Option(min=1, help="CPUs of each task with --ray.")] = 4
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every finished shard once more, and make damaged ones again.")
    ] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False
    gpu: GpuOption = None
    cores: CoresOption = None
    as_json: JsonOption = False
    quiet: QuietOption = False


def takes(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of one options object into a command with the object's fields as its parameters."""

    def decorate(function: Callable[[T], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(options(**values))

        hints = get_type_hints(options, include_extras=True)
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = hints
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # what typer reads
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if field.default is MISSING else field.default,
                    annotation=hints[field.name],
                )
                for field in fields(options)  # type: ignore[arg-type]  # a dataclass
            ]
        )
        return command

    return decorate


def command_words(verb: str, options: Any) -> tuple[str, ...]:
    """Return the command that has these options, the first two as arguments: what resumes the job."""
    known = fields(options)
    words = ["k2convert", verb, *(str(getattr(options, field.name)) for field in known[:2])]
    for field in known[2:]:
        value = getattr(options, field.name)
        if value == field.default or field.name == "dry_run":
            continue
        name = {"as_json": "json"}.get(field.name, field.name).replace("_", "-")
        flags = {True: f"--{name}", False: f"--no-{name}"}
        if isinstance(value, bool):
            words.append(flags[value])
        else:
            given = cast(list[Path], value) if isinstance(value, list) else [value]
            words += [word for one in given for word in (f"--{name}", str(one))]
    return tuple(words)


def on_branch(address: str, revision: str | None) -> str:
    """Return the address of a repository with the branch of --revision; raises BadParameter if it names one already."""
    if revision is not None and "@" in address:
        raise typer.BadParameter(f"{address} names a branch already: leave out --revision")
    return address if revision is None else f"{address}@{revision}"


def parse_size(text: str) -> int:
    """Return the bytes in `200GB`, `1.5TB`, `64GiB` or a plain number; raises PlanError."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kMGT]?)(i)?B?", text.strip(), flags=re.IGNORECASE)
    if match is None:
        raise PlanError(f"{text[:40]!r}: not a size. Write for example 200GB.")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
