"""`k2convert evaluate`: whole models computed from their checkpoints, layer by layer, beside a reference.

    embedding -> layer 0 -> ... -> layer 60 -> final norm, output matrix -> scores of every token
                    |                |                      |
                 error, routing   error, routing     evaluation.json

The reference goes through a layer first. Then every other model does, one after the other, and is compared with it
(comparison.py). A model is a checkpoint and a mode of its activations. After the last layer all models are scored
together (head.py). What was found is in the work folder (forward/work.py), layer by layer, and the document is made of
that, so an interrupted evaluation gives the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

from k2convert import __version__
from k2convert.calibration.memory import Memory, ModelSizes, pass_memory
from k2convert.checkpoint.files import list_folder
from k2convert.checkpoint.names import WORK_FOLDER
from k2convert.errors import CheckpointError, ResumeError
from k2convert.evaluation.checkpoints import EvaluatedCheckpoint
from k2convert.evaluation.comparison import LayerComparison, kept_windows, layer_figures
from k2convert.evaluation.head import PIECE_TOKENS, TILE_ROWS, TILE_TOKENS, Head, score_tokens
from k2convert.evaluation.kept import Inputs, Made, Origin, Output, origin_of, read_earlier, row_key, write_evaluation
from k2convert.evaluation.scores import Decode, TokenScores, compare_models, describe_worst, summarize
from k2convert.forward.layer_pass import LayerPass, PassModel, PassSize
from k2convert.forward.layers import Progress, each_layer
from k2convert.forward.weights import WeightReader
from k2convert.forward.work import FIGURES, HIDDEN
from k2convert.records.command import JobCommand
from k2convert.records.evaluation import FORMAT, KIND, EvaluatedModel, Evaluation, EvaluationRow, find_evaluation
from k2convert.records.events import SILENT, Events

_STATE_BYTES: Final = 4
_SCORE_BYTES: Final = 25  # of a token and a model, in the file of the head
_SLACK_BYTES: Final = 1 << 20


def stream_of(number: int) -> str:
    """Return the name of a model's stream of hidden states; the reference is model 0."""
    return f"{HIDDEN}-{number}" if number else HIDDEN


def pass_models(models: Sequence[Sequence[EvaluatedModel]], places: Sequence[str]) -> tuple[PassModel, ...]:
    """Return the models of the pass: those of each checkpoint, the reference's first. `places` are for messages."""
    numbered = enumerate((number, model) for number, own in enumerate(models) for model in own)
    return tuple(
        PassModel(
            stream=stream_of(index),
            checkpoint=number,
            fp4_activations=model.activations == "w4a4",
            fp8_cache=model.kv_cache == "fp8",
            name=places[number] if index else "",
        )
        for index, (number, model) in numbered
    )


def states_bytes(tokens: int, hidden_size: int, *, models: int) -> int:
    """Return the disk for hidden states and scores."""
    return models * tokens * (2 * hidden_size * _STATE_BYTES + _SCORE_BYTES) + _SLACK_BYTES


def evaluation_memory(model: ModelSizes, size: PassSize, *, models: int) -> Memory:
    """Count the peak of an evaluation of `models` models, in a layer or at the head."""
    memory = pass_memory(model, size)
    states = 4 * size.chunk_tokens * model.hidden
    tiles = 1 + -(-(size.workers + 1) * PIECE_TOKENS // TILE_TOKENS)
    head = models * (4 * max(TILE_TOKENS, size.window) + tiles * 2 * TILE_ROWS) * model.hidden
    if size.on_cpu:
        return Memory(memory.main + max(states, head - states), 0)
    return Memory(memory.main + max(states, head), max(memory.gpu, memory.gpu - states + head))


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """A planned evaluation. Nothing has been written yet.

    `checkpoints` and `models` begin with the reference. `inputs` are the files of each checkpoint as they were when
    the evaluation was planned.
    """

    layer_pass: LayerPass
    checkpoints: tuple[EvaluatedCheckpoint, ...]
    models: tuple[EvaluatedModel, ...]
    inputs: tuple[Inputs, ...]
    outputs: tuple[Output, ...]

    @property
    def bytes_read(self) -> int:
        """The bytes of all checkpoints that are read, if every expert is chosen. The head is read once per tile."""
        heads = len(self.checkpoints)
        parts = self.layer_pass.shards.parts
        sizes = [sum(end - begin for of in part.ranges.values() for begin, end in of) for part in parts]
        modes = [sum(model.checkpoint == number for model in self.layer_pass.models) for number in range(heads)]
        windows, length = self.layer_pass.text.windows.ids.shape
        tiles = -(-windows // max(1, TILE_TOKENS // length))
        layers = sum(size * modes[number % heads] for number, size in enumerate(sizes[:-heads]))
        return layers * -(-windows // self.layer_pass.text.chunk) + sum(sizes[-heads:]) * tiles

    def remove_work(self) -> None:
        """Remove the work folder, and the folder around it in a checkpoint that `run` did not write."""
        work = self.layer_pass.work
        work.remove_leftovers(self.layer_pass.job)
        around = work.folder.parent
        if around.name == WORK_FOLDER and around.is_dir() and not list_folder(around):
            shutil.rmtree(around, ignore_errors=True)

    def made(self) -> Made:
        """Return what the rows are made from."""
        text = self.layer_pass.text.windows.described()
        document = Evaluation(FORMAT, "evaluate", __version__, self.models[0], text, ())
        reference, *others = self.inputs
        origins: dict[str, Origin] = {}
        for one, inputs in zip(self.checkpoints[1:], others, strict=True):
            place = one.place if one.source.local is None else str(one.source.local.resolve())
            origins[one.name] = origin_of(place, reference, inputs)
        return Made(document, reference, origins, self.models[1:])

    def finished(self) -> Evaluation | None:
        """Return the evaluation if the files that it writes have it already, made from the same files and text.

        Raises DestinationError if one of them is something else, or has rows that would be lost.
        """
        made = self.made()
        rows: dict[tuple[str, str], EvaluationRow] = {}
        is_whole = True
        for output in self.outputs:
            holding, _ = read_earlier(output, made)
            found = {row_key(row.model): row for row in holding}
            models = zip(self.models, self.layer_pass.models, strict=True)
            wanted = [model for model, own in models if own.checkpoint in output.checkpoints and own.checkpoint]
            is_whole = is_whole and all(row_key(model) in found for model in wanted)
            rows |= found
        wanted = [row_key(model) for model in made.models]
        if not is_whole or any(key not in rows for key in wanted):
            return None
        text = next(find_evaluation(output.path) for output in self.outputs)
        assert text is not None
        chosen = tuple(rows[key] for key in wanted)
        return replace(made.document, text=text.text, rows=chosen, verdicts=compare_models(chosen))

    def check_unchanged(self) -> None:
        """Refuse to write the figures of files that changed while they were computed (ResumeError)."""
        for one, inputs in zip(self.checkpoints, self.inputs, strict=True):
            now = one.inputs()
            changed = sorted(name for name in {*now, *inputs} if now.get(name) != inputs.get(name))
            if changed:
                raise ResumeError(
                    f"{one.place}: {changed[0]} changed while the evaluation ran. Delete "
                    f"{self.layer_pass.work.folder} and run the same command again."
                )


@torch.no_grad()
def evaluate(
    plan: EvaluationPlan, *, decode: Decode | None = None, command: JobCommand | None = None, events: Events = SILENT
) -> Evaluation:
    """Do what is left of an evaluation, write its files, and return it. Can be called again after a failure.

    `decode` makes text of token ids, for the tokens that are shown. `command` is what the user typed. Raises any
    K2ConvertError.
    """
    with plan.layer_pass.resumed(command=command, events=events) as layer_pass:
        _compare_layers(plan, layer_pass, events)
        if plan.layer_pass.work.num_finished() == layer_pass.num_layers:
            _score(plan, layer_pass, events)
        found = _gather(plan, decode)
        plan.check_unchanged()
        for output in plan.outputs:
            for row in write_evaluation(output, plan.made(), found):
                if row_key(row.model) not in map(row_key, plan.made().models):
                    events.note(f"{output.path}: left out {row.model.name} {row.model.mode}: its files changed since")
    plan.remove_work()
    return found


def _compare_layers(plan: EvaluationPlan, layer_pass: LayerPass, events: Events) -> None:
    """Run every model through the layers that are not done, and declare each layer done."""
    comparison = LayerComparison(0, 0)
    with closing(each_layer(layer_pass, layer_pass.shards.around, events=events)) as layers:
        for layer in layers:
            number = layer_pass.models.index(layer.model)
            if number == 0:
                comparison = LayerComparison(len(layer_pass.models), layer_pass.shape[0])
                comparison.run_reference(layer)
            else:
                comparison.run(number, layer)
            if number == len(layer_pass.models) - 1:
                _finish(plan, layer.number, comparison.encode())


def _score(plan: EvaluationPlan, layer_pass: LayerPass, events: Events) -> None:
    """Score the tokens of every model after the last layer, and declare that done."""
    work = plan.layer_pass.work
    last = layer_pass.num_layers
    length = layer_pass.shape[1]
    kept = kept_windows(_read_figures(plan, last - 1))
    progress = Progress(events, share=len(layer_pass.models))
    found: list[dict[str, NDArray[Any]]] = []
    with ExitStack() as stack:
        heads: list[Head] = []
        for number in range(layer_pass.num_checkpoints):
            checkpoint = stack.enter_context(layer_pass.shards.around(last * layer_pass.num_checkpoints + number))
            heads.append(Head(stack.enter_context(closing(WeightReader(checkpoint)))))
        reads = [stack.enter_context(work.reading(model.stream, last, layer_pass.shape)) for model in layer_pass.models]
        step = max(1, TILE_TOKENS // length)
        of_models = [model.checkpoint for model in layer_pass.models]
        for start in range(0, layer_pass.shape[0], step):
            stop = min(start + step, layer_pass.shape[0])
            if (chosen := kept[start:stop]).any():
                # the hidden states [T, K] that predict a token: all but the last of each window
                states = [torch.as_tensor(read(start, stop)[chosen][:, :-1]).flatten(0, 1) for read in reads]
                targets = torch.as_tensor(layer_pass.ids[start:stop, 1:][chosen]).flatten()
                scored = score_tokens(
                    heads, of_models, states, targets, devices=layer_pass.text.devices, workers=layer_pass.text.threads
                )
                found.append({name: array.reshape(len(array), chosen.sum(), -1) for name, array in scored.items()})
            progress.reach(stop * length)
    scores = {name: np.concatenate([part[name] for part in found], axis=1) for name in found[0]}
    for number, model in enumerate(layer_pass.models):
        if not all(np.isfinite(scores[name][number]).all() for name in ("loss", "divergence")):
            raise CheckpointError(
                f"{plan.checkpoints[model.checkpoint].place}: its logits are not finite. Its final norm or its output "
                "matrix is damaged: download it again."
            )
    _finish(plan, last, save(scores))


def _finish(plan: EvaluationPlan, layer: int, figures: bytes) -> None:
    """Write the figures of a layer, or of the head after the last one, and declare it done."""
    work = plan.layer_pass.work
    work.write(work.path(FIGURES, layer), figures)
    work.finish(layer)


def _read_figures(plan: EvaluationPlan, layer: int) -> dict[str, NDArray[Any]]:
    path = plan.layer_pass.work.path(FIGURES, layer)
    plan.layer_pass.work.check(path)
    return load(path.read_bytes())


def _gather(plan: EvaluationPlan, decode: Decode | None) -> Evaluation:
    """Return the document of what the work folder has."""
    layers = [_read_figures(plan, number) for number in range(plan.layer_pass.num_layers)]
    scores = _read_figures(plan, plan.layer_pass.num_layers)
    likeliest = scores["likeliest"]
    kept = kept_windows(layers[-1])
    ids = plan.layer_pass.text.windows.ids
    windows = np.flatnonzero(kept)
    rows: list[EvaluationRow] = []
    for number, model in enumerate(plan.models[1:], start=1):
        figures = summarize(
            TokenScores(
                divergence=scores["divergence"][number],
                loss=scores["loss"][number],
                reference_loss=scores["loss"][0],
                agrees=likeliest[number] == likeliest[0],
                left_top5=scores["left_top5"][number],
            )
        )
        worst = describe_worst(
            scores["divergence"][number], ids[kept], windows, likeliest[0], likeliest[number], decode=decode
        )
        compared = tuple(layer_figures(arrays, number, kept) for arrays in layers)
        rows.append(EvaluationRow(model, figures, compared, worst))
    return Evaluation(
        format=FORMAT,
        kind=KIND,
        tool_version=__version__,
        reference=plan.models[0],
        text=replace(plan.layer_pass.text.windows.described(), dropped=int(np.count_nonzero(~kept))),
        rows=tuple(rows),
        verdicts=compare_models(rows),
    )
