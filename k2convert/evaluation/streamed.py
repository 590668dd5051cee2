"""`k2convert evaluate`: whole models computed from their checkpoints, layer by layer, beside a reference.

    embedding -> layer 0 -> ... -> layer 60 -> final norm, output matrix -> scores of every token
                    |                |                      |
                 error, routing   error, routing     evaluation.json

The reference goes through a layer first. Then every other model does, one after the other, and is compared with it
(LayerComparison). A model is a checkpoint and a mode of its activations. After the last layer all models are scored
together (head.py). The figures of each layer are in the work folder (forward/work.py), and the document is made of
them, so an interrupted evaluation gives the same bytes:

    layer-003.safetensors       of layer 3
        norm                    F64 [windows]: sum |h|^2 of the reference; NaN for a dropped window
        error                   F64 [models, windows]: sum |h - h'|^2
        agreeing                I64 [models, windows]: choices of experts that agree; -1 if that is not known
        choices                 I64 [1]: choices of experts in a window; 0 for a dense layer
    layer-061.safetensors       after the last layer: the arrays of head.score_tokens, [models, windows, tokens - 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save
from torch import Tensor

from k2convert import __version__
from k2convert.calibration.memory import Memory, ModelSizes, pass_memory
from k2convert.errors import CheckpointError, K2ConvertError
from k2convert.evaluation.head import PIECE_TOKENS, TILE_ROWS, Head, score_tokens
from k2convert.evaluation.plan import TILE_TOKENS, EvaluationPlan, check_replaced, write_evaluation
from k2convert.evaluation.scores import Decode, TokenScores, compare_models, describe_worst, summarize
from k2convert.forward.decoder import BlockObserver
from k2convert.forward.layer_pass import LayerPass, PassModel, PassText
from k2convert.forward.layers import Layer, Progress, each_layer, finite_windows
from k2convert.forward.moe import Routing
from k2convert.forward.weights import WeightReader
from k2convert.forward.work import FIGURES, HIDDEN
from k2convert.models import detect_family
from k2convert.models.names import WEIGHT, Architecture, block_starts
from k2convert.records.command import JobCommand
from k2convert.records.evaluation import FORMAT, KIND, EvaluatedModel, Evaluation, EvaluationRow, LayerFigures
from k2convert.records.events import SILENT, Events
from k2convert.text.tokenizers import open_tokenizer

Arrays = Mapping[str, NDArray[Any]]


class _Choices(BlockObserver):
    """An observer that keeps the experts int64 [T, k] that the tokens of a chunk chose; None in a dense layer."""

    experts: NDArray[np.int64] | None = None

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:  # noqa: ARG002
        self.experts = None if routing is None else routing.experts.cpu().numpy()


class LayerComparison:
    """Sums of one layer over windows, of `num_models` models, the reference counted. It runs them one by one."""

    def __init__(self, num_models: int, num_windows: int) -> None:
        self._norm = np.full(num_windows, np.nan)
        self._error = np.zeros((num_models, num_windows))
        self._agreeing = np.zeros((num_models, num_windows), dtype=np.int64)
        self._chosen: dict[int, NDArray[np.int16]] = {}
        self._rows: list[bytes] = []

    def run_reference(self, layer: Layer) -> None:
        """Run the reference through the layer, and keep what it chose."""
        self._rows = _router_rows(layer)
        observer = _Choices()
        with layer.writing() as write:
            for first, (states,) in layer.chunks():
                layer.run(first, states, observer)
                windows = first + np.flatnonzero(finite_windows(states))
                self._norm[windows] = [_energy(states[window - first]) for window in windows]
                if windows.size and observer.experts is not None:
                    experts = observer.experts.reshape(windows.size, -1, observer.experts.shape[1])
                    self._chosen |= zip(windows.tolist(), experts.astype(np.int16), strict=True)
                write(states)
        layer.progress.reach(layer.layer_pass.ids.size)

    def run(self, number: int, layer: Layer) -> None:
        """Run another model through the layer, and compare it."""
        observer = _Choices()
        numbers = self._expert_numbers(layer)
        shape = layer.layer_pass.shape
        after = layer.number + 1
        with layer.layer_pass.work.reading(HIDDEN, after, shape) as read, layer.writing() as write:
            for first, (states,) in layer.chunks():
                reference = read(first, first + states.shape[0])
                windows = np.flatnonzero(finite_windows(reference))
                states[~finite_windows(reference)] = np.nan
                layer.run(first, states, observer)
                for index, window in enumerate(windows.tolist()):
                    self._error[number, first + window] = _energy(states[window], reference[window])
                    if observer.experts is not None:
                        experts = observer.experts[index * shape[1] : (index + 1) * shape[1]]
                        self._agreeing[number, first + window] = self._agreement(first + window, experts, numbers)
                write(states)
        layer.progress.reach(layer.layer_pass.ids.size)

    def encode(self) -> bytes:
        """Return the content of the layer's file."""
        choices = next((chosen.size for chosen in self._chosen.values()), 0)
        arrays = {"norm": self._norm, "error": self._error, "agreeing": self._agreeing}
        return save(arrays | {"choices": np.array([choices])})

    def _expert_numbers(self, layer: Layer) -> NDArray[np.int64] | None:
        """Return which of the reference's experts each of a model's is, int64 [E]: None if that cannot be told.

        The rows of a pruned model's router are some of the reference's, unless it was smoothed.
        """
        rows = _router_rows(layer)
        if len(rows) == len(self._rows):
            return np.arange(len(rows))
        experts = {row: expert for expert, row in enumerate(self._rows)}
        if len(experts) == len(self._rows) and experts.keys() >= set(rows):
            return np.array([experts[row] for row in rows])
        return None

    def _agreement(self, window: int, experts: NDArray[np.int64], numbers: NDArray[np.int64] | None) -> int:
        if numbers is None or (chosen := self._chosen.get(window)) is None:
            return -1
        return int((chosen[:, :, None] == numbers[experts][:, None, :]).any(axis=2).sum())


def _router_rows(layer: Layer) -> list[bytes]:
    """Return the rows of a layer's router; nothing for a dense layer."""
    reader = layer.reader
    name = f"{detect_family(reader.checkpoint).router.format(layer=layer.number)}.{WEIGHT}"
    if layer.decoder.is_dense:
        return []
    return [row.tobytes() for row in reader.raw(name).numpy().reshape(reader.info(name).shape[0], -1)]


def _energy(states: NDArray[np.float32], other: NDArray[np.float32] | None = None) -> float:
    """Return sum |h|^2 of one window f32 [T, K], or of the difference of two, in FP64."""
    total = 0.0
    for start in range(0, states.shape[0], 64):  # in FP64 they fit into a core's cache
        rows = states[start : start + 64].astype(np.float64)
        if other is not None:
            rows -= other[start : start + 64]
        total += float(np.vdot(rows, rows))
    return total


def kept_windows(arrays: Arrays) -> NDArray[np.bool_]:
    """Return which windows were not dropped up to a layer, by its file."""
    return np.isfinite(arrays["norm"])


def layer_figures(arrays: Arrays, number: int, retained: NDArray[np.bool_]) -> LayerFigures:
    """Return the figures of one model and layer over the windows that were retained until the end."""
    agreeing = arrays["agreeing"][number, retained]
    choices = int(arrays["choices"][0])
    norm = float(arrays["norm"][retained].sum())
    error = float(arrays["error"][number, retained].sum())
    agreement = None
    if choices > 0 and (agreeing >= 0).all():
        agreement = float(agreeing.sum()) / (choices * agreeing.size)
    return LayerFigures(error / norm if norm else 0.0, agreement)


_STATE_BYTES: Final = 4
_SCORE_BYTES: Final = 25  # of a token and a model, in the file of the head
_SLACK_BYTES: Final = 1 << 20


def stream_of(number: int) -> str:
    """Return the name of a model's stream of hidden states; the reference is model 0."""
    return f"{HIDDEN}-{number}" if number else HIDDEN


def pass_models(models: Sequence[Sequence[EvaluatedModel]], addresses: Sequence[str]) -> tuple[PassModel, ...]:
    """Return the models of the pass: those of each checkpoint, the reference's first. `addresses` are for messages."""
    numbered = enumerate((number, model) for number, own in enumerate(models) for model in own)
    return tuple(
        PassModel(
            stream=stream_of(index),
            checkpoint=number,
            fp4_activations=model.activations == "w4a4",
            fp8_cache=model.kv_cache == "fp8",
            name=addresses[number] if index else "",
        )
        for index, (number, model) in numbered
    )


def states_bytes(tokens: int, architecture: Architecture, *, models: int) -> int:
    """Return the disk for hidden states and scores: before and after a layer, and before those that began a block."""
    states = 2 + len(block_starts(architecture.num_layers - 1, architecture.residual_block))
    return models * tokens * (states * architecture.hidden_size * _STATE_BYTES + _SCORE_BYTES) + _SLACK_BYTES


def evaluation_memory(model: ModelSizes, text: PassText, num_layers: int, *, models: int) -> Memory:
    """Count the peak of an evaluation of `models` models of which `num_layers` are left, in a layer or at the head."""
    memory = pass_memory(model, text, num_layers)
    states = 4 * text.chunk_tokens * model.hidden
    tiles = 1 + -(-(text.threads + 1) * PIECE_TOKENS // TILE_TOKENS)
    tile = 4 * max(TILE_TOKENS, text.window)
    head = (models * (tile + tiles * 2 * TILE_ROWS) + model.num_blocks * tile) * model.hidden
    if text.on_cpu:
        return Memory(memory.main + max(states, head - states), 0)
    return Memory(memory.main + max(states, head), max(memory.gpu, memory.gpu - states + head))


@torch.no_grad()
def evaluate(plan: EvaluationPlan, *, command: JobCommand | None = None, events: Events = SILENT) -> Evaluation:
    """Do what is left of an evaluation, write its files, and return it. Can be called again after a failure.

    `command` is what the user typed. Raises any K2ConvertError.
    """
    if (finished := plan.finished()) is not None:
        plan.remove_work()
        return finished
    with plan.layer_pass.resumed(command=command, events=events) as layer_pass:
        _compare_layers(plan, layer_pass)
        if plan.layer_pass.work.num_finished() == layer_pass.num_layers:
            _score(plan, layer_pass)
        evaluation = _gather(plan)
        plan.check_unchanged()
        for output in plan.outputs:
            check_replaced(output, evaluation.text, plan.models_of(output))
            write_evaluation(output.path, _part(evaluation, plan.models_of(output)), plan.identity(output))
    plan.remove_work()
    return evaluation


def _part(evaluation: Evaluation, models: Sequence[EvaluatedModel]) -> Evaluation:
    """Return the rows of some models, and the verdicts on them."""
    verdicts = tuple(
        verdict for verdict in evaluation.verdicts if verdict.nearer in models or verdict.farther in models
    )
    return replace(evaluation, rows=tuple(row for row in evaluation.rows if row.model in models), verdicts=verdicts)


def _compare_layers(plan: EvaluationPlan, layer_pass: LayerPass) -> None:
    """Run every model through the layers that are not done, and declare each layer done."""
    comparison = LayerComparison(0, 0)
    with closing(each_layer(layer_pass)) as layers:
        for layer in layers:
            number = layer_pass.models.index(layer.model)
            if number == 0:
                comparison = LayerComparison(len(layer_pass.models), layer_pass.shape[0])
                comparison.run_reference(layer)
            else:
                comparison.run(number, layer)
            if number == len(layer_pass.models) - 1:
                _finish(plan, layer.number, comparison.encode())


def _score(plan: EvaluationPlan, layer_pass: LayerPass) -> None:
    """Score the tokens of every model after the last layer, and declare that done."""
    work = plan.layer_pass.work
    last = layer_pass.num_layers
    length = layer_pass.shape[1]
    retained = kept_windows(_read_figures(plan, last - 1))
    progress = Progress(layer_pass.shards.events, share=len(layer_pass.models))
    parts: list[dict[str, NDArray[Any]]] = []
    with ExitStack() as stack:
        heads: list[Head] = []
        for number in range(layer_pass.num_checkpoints):
            checkpoint = stack.enter_context(layer_pass.shards.part(last * layer_pass.num_checkpoints + number))
            heads.append(Head(stack.enter_context(closing(WeightReader(checkpoint)))))
        reads = [
            [
                *map(stack.enter_context, layer_pass.reading_blocks(model, last)),
                stack.enter_context(work.reading(model.stream, last, layer_pass.shape)),
            ]
            for model in layer_pass.models
        ]
        step = max(1, TILE_TOKENS // length)
        of_models = [model.checkpoint for model in layer_pass.models]
        for start in range(0, layer_pass.shape[0], step):
            stop = min(start + step, layer_pass.shape[0])
            if (chosen := retained[start:stop]).any():
                # the hidden states [T, K] that predict a token: all but the last of each window
                states = [
                    heads[model].mixed(
                        *(torch.as_tensor(read(start, stop)[chosen][:, :-1]).flatten(0, 1) for read in own)
                    )
                    for model, own in zip(of_models, reads, strict=True)
                ]
                targets = torch.as_tensor(layer_pass.ids[start:stop, 1:][chosen]).flatten()
                scored = score_tokens(
                    heads, of_models, states, targets, devices=layer_pass.text.devices, workers=layer_pass.text.threads
                )
                parts.append({name: array.reshape(len(array), chosen.sum(), -1) for name, array in scored.items()})
            progress.reach(stop * length)
    scores = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
    for number, model in enumerate(layer_pass.models):
        if not all(np.isfinite(scores[name][number]).all() for name in ("loss", "divergence")):
            raise CheckpointError(
                f"{plan.checkpoints[model.checkpoint].address}: its logits are not finite. Its final norm or its "
                "output matrix is damaged: download it again."
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


def _find_decoder(plan: EvaluationPlan) -> Decode | None:
    """Return what makes text of token ids: the reference's tokenizer. None if it has none that can be used."""
    try:
        return open_tokenizer(plan.checkpoints[0].checkpoint.folder).decode
    except K2ConvertError:
        return None


def _gather(plan: EvaluationPlan) -> Evaluation:
    """Return the document of what the work folder has."""
    layers = [_read_figures(plan, number) for number in range(plan.layer_pass.num_layers)]
    scores = _read_figures(plan, plan.layer_pass.num_layers)
    likeliest = scores["likeliest"]
    retained = kept_windows(layers[-1])
    ids = plan.layer_pass.text.windows.ids
    windows = np.flatnonzero(retained)
    decode = _find_decoder(plan)
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
            scores["divergence"][number], ids[retained], windows, likeliest[0], likeliest[number], decode=decode
        )
        compared = tuple(layer_figures(arrays, number, retained) for arrays in layers)
        rows.append(EvaluationRow(model, figures, compared, worst))
    return Evaluation(
        format=FORMAT,
        kind=KIND,
        tool_version=__version__,
        reference=plan.models[0],
        text=replace(plan.layer_pass.text.windows.described(), dropped=int(np.count_nonzero(~retained))),
        rows=tuple(rows),
        verdicts=compare_models(rows),
    )
