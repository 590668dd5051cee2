"""`run`: plan, show or do a job, whether its ends are folders or repositories of the Hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from k2convert.choices import Activations, Layout, Rule
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import (
    CHECKS,
    MACHINE,
    RESUMES,
    TEXT_FORMS,
    DeviceOption,
    Json,
    MaxDisk,
    Public,
    Quiet,
    SourceArgument,
    Yes,
    argument,
    check_new_place,
    flag,
    option,
    refuse_contradictions,
    typed_command,
)
from k2convert.errors import read_size, require_extra
from k2convert.hub.client import SCHEME, Hub, bound_memory

RESULT: Final = "Result"
_GPU_UNUSED: Final = "note: --device cuda: the conversion runs on the CPU. A GPU is used only with --calibrate."

Destination = Annotated[
    str, argument("DEST", "Folder of the converted checkpoint, or hf://owner/name[@branch].", check_new_place)
]
DryRun = Annotated[bool, flag("--dry-run", "Print the plan and write nothing.")]
Calibrate = Annotated[
    list[Path] | None, option(f"Calibrate while converting, on {TEXT_FORMS}. May be repeated.", "FILE")
]
RuleOption = Annotated[
    Rule | None,
    option(
        "mse: least squared error; max: max calibration; gptq: fitted to the text of --calibrate "
        "[default: from the recipe; gptq with --calibrate]."
    ),
]
Recipe = Annotated[
    str | None, option("A file, or a name that `recipes` lists [default: by the model].", "RECIPE", RESULT)
]
SETTINGS_HELP: Final = "Change a key of the recipe: smoothing=false, kv_cache=fp8, target=bf16. May be repeated."
Settings = Annotated[list[str] | None, option(SETTINGS_HELP, "KEY=VALUE", RESULT, name="--set")]
LayoutOption = Annotated[
    Layout | None, option("Tensor names and config of the result [default: from the recipe].", panel=RESULT)
]
ActivationsOption = Annotated[
    Activations | None, option("4-bit activations, or weight-only [default: from the recipe].", panel=RESULT)
]
Verify = Annotated[bool, flag("--verify", "Hash every finished shard, and convert damaged ones again.", CHECKS)]
Workers = Annotated[int | None, option("Shards at a time [default: from cores and devices].", "N", MACHINE, min=1)]
PartOption = Annotated[str | None, option("Convert part I of N. Run without it at the end.", "I/N", MACHINE)]
RAY_HELP: Final = "Convert on a Ray cluster: its address, or auto for the one here."
Ray = Annotated[str | None, option(RAY_HELP, "ADDRESS", MACHINE)]


def run(
    source: SourceArgument,
    destination: Destination,
    dry_run: DryRun = False,
    calibrate: Calibrate = None,
    rule: RuleOption = None,
    recipe: Recipe = None,
    settings: Settings = None,
    layout: LayoutOption = None,
    activations: ActivationsOption = None,
    verify: Verify = False,
    json: Json = False,
    quiet: Quiet = False,
    device: DeviceOption = "auto",
    workers: Workers = None,
    max_disk: MaxDisk = None,
    part: PartOption = None,
    ray: Ray = None,
    public: Public = False,
    yes: Yes = False,
) -> None:
    """Convert an INT4 or MXFP4 checkpoint to NVFP4. Running it again resumes."""
    from k2convert.cli import console, job_view
    from k2convert.cli.progress import waiting
    from k2convert.job.locations import read_destination
    from k2convert.job.opening import text_files
    from k2convert.job.prepare import JobOptions, open_job
    from k2convert.job.run import read_part

    console.set_output(json=json, quiet=quiet)
    say_when_interrupted(lambda: "" if dry_run else RESUMES, resumes=not dry_run)
    to_hub = destination.startswith(SCHEME)
    uses_hub = to_hub or source.startswith(SCHEME)
    in_order = "--calibrate goes through the layers in order: leave out"
    refuse_contradictions(
        (part and uses_hub, "--part needs folders that every task of the array sees, not hf://"),
        (part and calibrate, f"{in_order} --part"),
        (part and ray, "--ray and --part both share out the shards: use one of them"),
        (part and verify, "--verify is for the run that ends the job: leave out --part"),
        (ray and calibrate, f"{in_order} --ray"),
        (ray and max_disk, "--max-disk bounds this machine, and the nodes of --ray have their own: leave it out"),
        (public and not to_hub, "--public only applies to a destination hf://owner/name"),
        (max_disk and not uses_hub, "--max-disk only applies to hf:// sources or destinations: leave it out"),
    )
    array_part = None if part is None else read_part(part)
    require_extras(calibrate=calibrate, ray=ray)
    options = JobOptions(
        source=source,
        destination=read_destination(destination),
        recipe=recipe,
        settings=_recipe_settings(settings or (), rule=rule, layout=layout, activations=activations),
        text=text_files(calibrate, device=device, rounds=True) if calibrate else None,
        workers=workers,
        max_disk=read_size("--max-disk", max_disk),
        private=not public,
    )
    if to_hub:
        bound_memory()
    hub = Hub(notify=console.notifier(), warn=console.print_note, outages_pass=not dry_run)
    with (
        waiting(f"{'loading torch, ' if calibrate else ''}reading the headers of {source}") as waits,
        open_job(options, hub=hub) as job,
    ):
        waits.close()
        if device == "cuda" and not calibrate:
            console.print_note(_GPU_UNUSED)
        command = typed_command(source=source)
        cluster = None
        if ray is not None:
            from k2convert.job.ray import connect

            cluster = connect(ray)
        job_view.show_notices(job, source)
        if dry_run:
            job_view.show_plan_of(job, source, cluster)
        elif array_part is not None:
            job_view.convert_part(job, array_part, command)
        elif job.target is not None and job.is_published:
            job_view.show_published_before(job, job.target)
        else:
            job_view.convert(job, command, cluster, verify=verify, yes=yes)


def require_extras(**used: object) -> None:
    """Raise an error of the package if the libraries of an option that is used are missing."""
    for name, value in used.items():
        if value:
            require_extra("ray" if name == "ray" else "calibrate", purpose=f"--{name}")


def _recipe_settings(settings: Sequence[str], **named: str | None) -> dict[str, object]:
    """Return what --set and the `named` options replace in a recipe; raises BadParameter for a key set twice."""
    from k2convert.plan.recipe import parse_settings

    options: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    overrides = parse_settings(settings)
    if twice := options.keys() & overrides.keys():
        raise typer.BadParameter(f"--set {', '.join(twice)}: there is an option for it too. Leave out one of them")
    return overrides | options
