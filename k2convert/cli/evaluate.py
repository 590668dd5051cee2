"""`evaluate`: plan an evaluation, show what it needs, do it, and show what was found."""

from pathlib import Path
from typing import Annotated

from k2convert.choices import EVALUATION_TOKENS, EVALUATION_WINDOW, ComputedKvCache, RequestedActivations
from k2convert.cli.interrupts import say_when_interrupted
from k2convert.cli.options import (
    ADDRESS,
    RESUMES,
    TEXT_FORMS,
    DeviceOption,
    Json,
    MaxDisk,
    Quiet,
    argument,
    check_folder,
    check_source,
    flag,
    option,
    refuse_contradictions,
)
from k2convert.errors import read_size
from k2convert.hub.client import SCHEME, Hub


def evaluate(
    reference: Annotated[
        str, argument("REFERENCE", f"The model to compare with: a folder, or {ADDRESS}.", check_source)
    ],
    checkpoints: Annotated[
        list[str],
        argument(
            "CHECKPOINT...",
            f"INT4, MXFP4, NVFP4 or BF16 checkpoints of the same model, with FP8 layers or not: folders, or {ADDRESS}.",
            check_source,
        ),
    ],
    text: Annotated[list[Path], option(f"Text: {TEXT_FORMS}. May be repeated.", "FILE")],
    dry_run: Annotated[bool, flag("--dry-run", "Print the memory and the disk needed, and write nothing.")] = False,
    tokens: Annotated[int, option("Tokens to use.", "N", min=2)] = EVALUATION_TOKENS,
    window: Annotated[
        int, option("Window length in tokens (the context of each prediction).", "N", min=2)
    ] = EVALUATION_WINDOW,
    activations: Annotated[
        RequestedActivations | None, option("Activations of NVFP4 weights [default: as config.json declares].")
    ] = None,
    kv_cache: Annotated[
        ComputedKvCache | None, option("Compute as with such a KV cache, except the reference [default: FP32].")
    ] = None,
    device: DeviceOption = "auto",
    max_disk: MaxDisk = None,
    out: Annotated[
        Path | None,
        option("File for all rows [default: evaluation.json in each CHECKPOINT].", "FILE", check=check_folder),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure how far whole models are from a reference, on a text. It computes all of them layer by layer. Running it
    again resumes.
    """
    from k2convert.cli import console
    from k2convert.cli.evaluation_view import check_and_evaluate, show_result
    from k2convert.cli.progress import waiting
    from k2convert.job.evaluation import EvaluationOptions, open_evaluation
    from k2convert.job.opening import text_files
    from k2convert.plan.recipe import TextUse

    console.set_output(json=json, quiet=quiet)
    say_when_interrupted(lambda: "" if dry_run else RESUMES, resumes=not dry_run)
    addresses = [reference, *checkpoints]
    uses_hub = any(address.startswith(SCHEME) for address in addresses)
    refuse_contradictions((max_disk and not uses_hub, "--max-disk only applies to hf:// checkpoints"))
    with (
        waiting(f"loading torch, reading the headers of {', '.join(addresses)}") as waits,
        open_evaluation(
            reference,
            checkpoints,
            text_files(text, device=device),
            TextUse(tokens=tokens, window=window),
            EvaluationOptions(activations, kv_cache, out, max_disk=read_size("--max-disk", max_disk)),
            hub=Hub(notify=console.notifier(), warn=console.print_note),
        ) as plan,
    ):
        waits.close()
        finished = plan.finished()
        if finished is None:
            check_and_evaluate(plan, reference, dry_run=dry_run)
            return
        if not dry_run:
            plan.remove_work()
        console.print_note(f"{', '.join(str(output.path) for output in plan.outputs)}: already complete")
        show_result(plan, finished)
