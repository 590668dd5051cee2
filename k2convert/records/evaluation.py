"""The document of an evaluation: how far whole models are from a reference on a text.

`k2convert evaluate` computes the models from their checkpoints and writes RESULT/evaluation.json. Divergences are
KL(reference || model) of the next token, in nats.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from k2convert.checkpoint.files import file_digest, is_there
from k2convert.checkpoint.names import CONFIG_NAME, EVALUATION_NAME
from k2convert.choices import Activations, ServedKvCache
from k2convert.errors import CheckpointError, remedy
from k2convert.records.document import Count, Digest, Real, Share, read_document

FORMAT: Final = 1
KIND: Final = "evaluate"
MAX_ROWS: Final = 64
MAX_WINDOWS: Final = 1 << 16  # means by window are kept of at most so many
_REMEDY: Final = "Delete the file, or run `k2convert evaluate` again."

Difference = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=10_000)]
"""A name, or the text of a few tokens. Like every list, it has a limit, so that a page which shows it has one too."""

HISTOGRAM_EDGES: Final = tuple(10.0 ** (power / 4) for power in range(-32, 5))
"""Borders between the counts of a histogram: 1e-8, ..., 10. The first count is below the first border."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over tokens, with its standard error over windows; None for a single window."""

    mean: Difference
    standard_error: Real | None


@dataclass(frozen=True, slots=True)
class PositionMean:
    """The mean divergence of the tokens at positions [first, stop) of their windows."""

    first: Count
    stop: Count
    mean: Real


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(reference || model) of the next token. `p99` and `p999` are the quantiles .99 and .999."""

    mean: Real
    standard_error: Real | None
    median: Real
    p99: Real
    p999: Real
    maximum: Real
    by_position: Annotated[tuple[PositionMean, ...], Field(max_length=64)]
    histogram: tuple[Count, ...]  # tokens between HISTOGRAM_EDGES
    # means of windows; empty in an older file, and above MAX_WINDOWS
    by_window: Annotated[tuple[Real, ...], Field(max_length=MAX_WINDOWS)] = ()

    def __post_init__(self) -> None:
        if len(self.histogram) != len(HISTOGRAM_EDGES) + 1:
            raise ValueError(f"histogram has {len(self.histogram)} counts, not {len(HISTOGRAM_EDGES) + 1}")


@dataclass(frozen=True, slots=True)
class Figures:
    """One model against the reference, over all predicted tokens of all windows."""

    divergence: Divergence
    perplexity: Real
    reference_perplexity: Real
    log_likelihood: Mean  # the model's of the text's next token, less the reference's
    top1_agreement: Share  # share of tokens where both have the same most likely next token
    left_top5: Share  # share where the reference's is not among the model's five most likely


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """The hidden states after one layer: sum |h - h'|^2 / sum |h|^2, h being the reference's."""

    relative_error: Real
    routing_agreement: Share | None  # of the reference's choices of experts; None if dense or not known


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large divergence, in the tokenizer's texts, or token ids where there is none."""

    window: Count
    position: Count  # of the token itself in its window
    divergence: Real
    before: Text  # the text before it
    token: Text
    reference_token: Text  # its most likely token
    model_token: Text


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model that was computed from a checkpoint."""

    name: Text  # of a folder, or an address
    weights: Digest | None = None  # their digest; None in the file of another kind
    activations: Activations | None = None  # None if the weights are not NVFP4
    kv_cache: ServedKvCache | None = None  # None for FP32
    config: Digest | None = None  # digest of config.json, None in an older file

    @property
    def mode(self) -> str:
        """Mode in which the model was computed, in words; empty for weights that are not NVFP4, with an FP32 cache."""
        cache = ""
        if self.kv_cache is not None:
            cache = f"{self.kv_cache.upper()} KV"
        return ", ".join(filter(None, ((self.activations or "").upper(), cache)))


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One model against the reference."""

    model: EvaluatedModel
    figures: Figures
    layers: Annotated[tuple[LayerFigures, ...], Field(max_length=1000)] = ()
    worst: Annotated[tuple[WorstToken, ...], Field(max_length=100)] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two models on the same tokens: the mean of KL(reference || farther) - KL(reference || nearer) over windows."""

    nearer: EvaluatedModel
    farther: EvaluatedModel
    difference: Mean

    @property
    def is_clear(self) -> bool:
        """Return whether the difference is more than two standard errors."""
        error = self.difference.standard_error
        return error is not None and self.difference.mean > 2 * error


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """Text that was read: the names and digests of the texts, and the windows of token ids drawn from them."""

    texts: Annotated[tuple[tuple[Text, Digest], ...], Field(max_length=1000)]
    token_ids: Digest  # digest of the ids
    tokens: Count
    window: Count
    windows: Count
    seed: Count
    dropped: Count = 0  # windows whose hidden states are not finite: they count nowhere


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The content of evaluation.json, and what `evaluate --json` prints.

    Files of another kind are of releases 0.2 and 0.3, of two servers, and measure no weights. Nothing reads their
    figures, and `top_k` and `noise` are in them alone.
    """

    format: Literal[1]
    kind: Annotated[Text, Field(pattern="^[a-z]+$")]
    tool_version: Annotated[Text, Field(alias="k2convert")]
    reference: EvaluatedModel
    text: EvaluationText
    rows: Annotated[tuple[EvaluationRow, ...], Field(max_length=MAX_ROWS)]
    top_k: Count | None = None
    noise: Real | None = None
    verdicts: Annotated[tuple[Verdict, ...], Field(max_length=MAX_ROWS * MAX_ROWS)] = ()  # of one mode


def find_evaluation(path: Path) -> Evaluation | None:
    """Read a file, or a result's evaluation.json; None if there is none; raises MalformedFileError."""
    path = path / EVALUATION_NAME if path.is_dir() else path
    if is_there(path):
        return read_document(Evaluation, path)
    return None


def fresh_evaluation(folder: Path, *, weights: str) -> Evaluation | None:
    """Read a result's evaluation.json if there is one; raises CheckpointError if its weights or config differ."""
    with remedy(_REMEDY):
        evaluation = find_evaluation(folder)
    if evaluation is None or evaluation.kind != KIND:
        return None
    where = folder / EVALUATION_NAME
    if not evaluation.rows:
        raise CheckpointError(f"{where}: measures no model. {_REMEDY}")
    config = None
    if (folder / CONFIG_NAME).is_file():
        config = file_digest(folder / CONFIG_NAME)
    if any(row.model.config not in (None, config) for row in evaluation.rows):
        raise CheckpointError(f"{where}: measures a different {CONFIG_NAME} than this result has. {_REMEDY}")
    if any(row.model.weights != weights for row in evaluation.rows):
        raise CheckpointError(f"{where}: measures other weights than this result has. {_REMEDY}")
    return evaluation
