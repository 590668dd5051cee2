"""Convert Kimi K2 (INT4) and Kimi K3 (MXFP4) to NVFP4 in one streamed, resumable, measured pass.

The package from the ground up. A subpackage imports itself and what is above it in this list:

    errors      the error tree, and the optional libraries that can be missing
    machine     the cores and the memory of the job, and a pool of buffers
    choices     words and sizes that several subpackages share
    checkpoint  safetensors and checkpoint folders
    quantize    number formats, rules, metrics, kernels: numbers only
    models      families of checkpoints, tensor names, the projections to convert
    hub         everything that talks to the Hub
    plan        recipe, plan, exclude list, inspection
    deploy      which GPUs hold it, and how to serve it
    records     fingerprint, journal, ledger, events
    text        texts as windows of token ids
    forward     one forward pass, and the layer pass: the loop over the layers of a model
    calibration the conversion with gptq
    check       the servable contract, weight error, reference layers
    evaluation  the whole model, layer by layer
    report      the report as page, Markdown and picture, and the model card
    job         what a run does, in order
    prune       a checkpoint with some of its experts
    cli         the command line

The folder guide/ has the pages of `k2convert guide`.

The functions below are the verbs of the command line for a program. They raise K2ConvertError, print nothing, load what
they need when they are called, and leave the settings of the process as they found them. A path is text, bytes or a
PathLike.

        import k2convert

        outcome = k2convert.convert("Kimi-K2-Thinking", "Kimi-K2-Thinking-NVFP4")
        print(outcome.folder, len(outcome.records), outcome.num_bytes)
        report = k2convert.validate(outcome.folder, source="Kimi-K2-Thinking")
        assert report.passed

A subclass of Events gets the progress. Its methods are called from several threads:

        from tqdm import tqdm

        class Bar(k2convert.Events):
            def __init__(self):
                self.bar = tqdm(unit="B", unit_scale=True)

            def begun(self, extent, *, keep=None):
                self.bar.total, self.bar.n = extent.phases["convert"]
                self.bar.refresh()

            def progress(self, *, bytes_in=0, bytes_out=0, tensors=0):
                self.bar.update(bytes_in)

        k2convert.convert("Kimi-K2-Thinking", "Kimi-K2-Thinking-NVFP4", events=Bar())
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing this package takes no time: the command has to catch signals first
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from typing import Literal, TypeAlias

    from k2convert.check.results import ValidationReport
    from k2convert.deploy.memory import Fit
    from k2convert.errors import K2ConvertError as K2ConvertError
    from k2convert.job.run import Outcome
    from k2convert.plan.inspection import Inspection
    from k2convert.records.evaluation import Evaluation
    from k2convert.records.events import Events as Events

    AnyPath: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]

__version__ = "0.4.0"


def __getattr__(name: str) -> object:
    """Import the classes of this package's interface on use."""
    if name == "K2ConvertError":
        from k2convert.errors import K2ConvertError

        return K2ConvertError
    if name == "Events":
        from k2convert.records.events import Events

        return Events
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def convert(
    source: AnyPath,
    destination: AnyPath,
    *,
    recipe: AnyPath | None = None,
    settings: Mapping[str, object] | None = None,
    text: AnyPath | Sequence[AnyPath] = (),
    device: Literal["auto", "cpu", "cuda"] = "auto",
    workers: int | None = None,
    max_disk: int | str | None = None,
    private: bool = True,
    verify: bool = False,
    events: Events | None = None,
) -> Outcome:
    """Convert a checkpoint: `k2convert run`. Called again after a failure, it resumes.

    `source` and `destination` are folders or hf://owner/name. `recipe` is a name or a file, that of the source's family
    by default; `settings` replace its keys, like {"rule": "max", "calibration.tokens": 4096}. With the files `text`,
    rule gptq converts, on `device`; without them, weights are converted on the CPU. `max_disk` is in bytes, or text
    like "200GB". A new repository is private; `private=False` makes it public. With `verify`, finished shards are
    hashed first. `events` gets the progress.

    Raises InvalidCheckpointError if a tensor is below the recipe's error budget (the result stays), UnservableError if
    a result for the Hub breaks a rule (nothing is published), and any other K2ConvertError.
    """
    from typing import get_args

    from k2convert.choices import Device
    from k2convert.errors import check_choice, check_flags, read_size
    from k2convert.hub.client import Hub
    from k2convert.job.host_process import host_process, read_events, read_optional_path, read_path, read_paths
    from k2convert.job.locations import read_destination
    from k2convert.job.opening import text_files
    from k2convert.job.prepare import JobOptions, open_job
    from k2convert.job.run import execute, outcome_of
    from k2convert.records.ledger import below_budget, check_budget

    check_flags(private=private, verify=verify)
    files = read_paths("text", text, least=0)
    listener = read_events(events)
    check_choice("device", device, get_args(Device))
    with (
        host_process(torch_for="text" if files else None),
        open_job(
            JobOptions(
                source=read_path("source", source),
                destination=read_destination(read_path("destination", destination)),
                recipe=read_optional_path("recipe", recipe),
                settings=settings or {},
                text=text_files(files, device=device, rounds=True) if files else None,
                workers=workers,
                max_disk=read_size("max_disk", max_disk),
                private=private,
            ),
            hub=Hub(notify=listener.note, warn=listener.note),
        ) as job,
    ):
        if job.target is not None and job.is_published:
            from dataclasses import replace

            from k2convert.job.publish import clean_up_published

            published = outcome_of(job, job.finished.only(()), job.finished)
            return replace(published, commit=clean_up_published(job, job.target))
        outcome = execute(job, verify=verify, events=listener)
        recipe_used = job.plan.recipe
        check_budget(job.destination.folder, recipe_used, below_budget(outcome.records.values(), recipe_used))
        return outcome


def validate(
    result: AnyPath,
    source: AnyPath | None = None,
    *,
    layers: Sequence[int] | Literal["all"] | None = None,
    events: Events | None = None,
) -> ValidationReport:
    """Check a result against the rules of a servable checkpoint, and measure its weights against the source's:
    `k2convert validate`.

    `result` and `source` are folders or hf://owner/name. The MoE `layers`, numbers or "all", are computed on synthetic
    hidden states, if both are folders. `passed` of the report says whether to serve it. Raises CheckpointError if a
    checkpoint cannot be read, and any other K2ConvertError.
    """
    from k2convert.check.results import LAYERS_OF_FOLDERS, LayersRequest
    from k2convert.errors import ArgumentError, require_extra
    from k2convert.hub.client import Hub
    from k2convert.job.host_process import host_process, read_events, read_layers, read_optional_path, read_path
    from k2convert.job.results import open_result_at

    request = numbers = None
    if layers is not None:
        numbers = read_layers(layers)
        require_extra("torch", purpose="layers")
        if source is None:
            raise ArgumentError("layers need the source.")
    listener = read_events(events)
    hub = Hub(notify=listener.note, warn=listener.note)
    with (
        host_process(uses_torch=numbers is not None),
        open_result_at(read_path("result", result), source=read_optional_path("source", source), hub=hub) as opened,
    ):
        if numbers is not None and opened.source is not None:
            if opened.shards.is_remote:
                raise ArgumentError(f"{LAYERS_OF_FOLDERS}.")
            from k2convert.check.reference_layers import check_layers_exist
            from k2convert.models import read_architecture

            numbers = numbers or read_architecture(opened.source).moe_layers
            check_layers_exist(opened.source, numbers)
            request = LayersRequest(numbers, None, tokens=256)
        return opened.validate(layers=request, events=listener)


def evaluate(
    reference: AnyPath,
    checkpoints: AnyPath | Sequence[AnyPath],
    text: AnyPath | Sequence[AnyPath],
    *,
    tokens: int = 32_768,
    window: int = 2048,
    activations: Literal["w4a4", "w4a16", "both"] | None = None,
    kv_cache: Literal["fp8"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    max_disk: int | str | None = None,
    out: AnyPath | None = None,
    any_text: bool = False,
    events: Events | None = None,
) -> Evaluation:
    """Measure how far whole models are from a reference on a text: `k2convert evaluate`.

    All are folders or hf://owner/name. The evaluation is written to `out`, or without it to evaluation.json in every
    checkpoint's folder. `any_text` accepts a text that a checkpoint was calibrated on. `max_disk` is in bytes. Called
    again after a failure, it resumes. Raises any K2ConvertError.
    """
    from pathlib import Path
    from typing import get_args

    from k2convert.choices import ComputedKvCache, RequestedActivations
    from k2convert.errors import check_choice, check_flags, read_size
    from k2convert.hub.client import Hub
    from k2convert.job.host_process import host_process, read_events, read_optional_path, read_path, read_paths
    from k2convert.job.opening import text_files
    from k2convert.plan.recipe import text_use

    if activations is not None:
        check_choice("activations", activations, get_args(RequestedActivations))
    if kv_cache is not None:
        check_choice("kv_cache", kv_cache, get_args(ComputedKvCache))
    check_flags(any_text=any_text)
    path = read_optional_path("out", out)
    listener = read_events(events)
    with host_process(torch_for="evaluate"):
        from k2convert.evaluation.streamed import evaluate as measure
        from k2convert.job.evaluation import EvaluationOptions, open_evaluation

        with open_evaluation(
            read_path("reference", reference),
            read_paths("checkpoints", checkpoints),
            text_files(read_paths("text", text), device=device),
            text_use(tokens=tokens, window=window),
            EvaluationOptions(
                activations,
                kv_cache,
                None if path is None else Path(path),
                any_text,
                read_size("max_disk", max_disk),
            ),
            hub=Hub(notify=listener.note, warn=listener.note),
        ) as plan:
            return measure(plan, events=listener)


def inspect(source: AnyPath) -> Inspection:
    """Describe a checkpoint, in a folder or at hf://owner/name, from its headers: `k2convert inspect`.

    Raises CheckpointError, PlanError for an unknown family, and HubError.
    """
    from k2convert.hub.client import Hub
    from k2convert.job.host_process import host_process, read_path
    from k2convert.job.opening import inspect_source

    with host_process():
        return inspect_source(read_path("source", source), hub=Hub(outages_pass=False))


def fit(
    checkpoint: AnyPath,
    *,
    gpu: str | None = None,
    context: int = 8192,
    requests: int = 1,
    recipe: AnyPath | None = None,
) -> list[Fit]:
    """Return which GPUs hold a checkpoint, and with how much KV cache, from its headers: `k2convert fit`.

    `checkpoint` is a folder or hf://owner/name; a source is weighed as it would be converted, by `recipe` (a name or a
    file) or by that of its family. Of each kind, or of `gpu` alone (a name, or a memory such as "96GB"), the list has
    the least number up to 16 and the usual ones above it, the smallest memory first.
    `requests` of `context` tokens must fit at once, in a KV cache of the type that config.json says. Raises FitError,
    CheckpointError, PlanError, RecipeError, HubError and ArgumentError.
    """
    from k2convert.deploy.gpus import GPUS, find_gpu
    from k2convert.deploy.memory import Settings, find_holders
    from k2convert.deploy.model import read_model
    from k2convert.errors import ArgumentError, check_number, quoted
    from k2convert.hub.client import Hub
    from k2convert.job.host_process import host_process, read_optional_path, read_path
    from k2convert.job.locations import open_checkpoint_at

    check_number("context", context)
    check_number("requests", requests)
    if gpu is not None and type(gpu) is not str:
        raise ArgumentError(f"gpu {quoted(gpu)}: expected a name such as 'b200', or a memory such as '96GB'.")
    gpus = GPUS.values() if gpu is None else (find_gpu(gpu),)
    named = read_optional_path("recipe", recipe)
    with host_process(), open_checkpoint_at(read_path("checkpoint", checkpoint), hub=Hub(outages_pass=False)) as opened:
        model = read_model(opened.checkpoint, recipe=named)
    return find_holders(model, settings=Settings(model.kv, context, requests), gpus=gpus)
