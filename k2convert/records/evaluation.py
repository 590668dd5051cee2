"""The document of an evaluation: how far whole models are from a reference on a text.

`k2convert evaluate` computes the models from their checkpoints and writes RESULT/evaluation.json. `k2convert compare`
asks two servers and writes the same form. Divergences are KL(reference || model) of the next token, in nats.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from k2convert.checkpoint.names import EVALUATION_NAME
from k2convert.choices import Activations, ServedKvCache
from k2convert.errors import CheckpointError
from k2convert.records.document import Count, Digest, Real, Share, read_document

FORMAT: Final = 1

Difference = Annotated[float, Field(allow_inf_nan=False)]

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
    """KL(reference || model) of the next token. `p99` and `p999` are the quantiles .99 and .999.

    `histogram` counts tokens between HISTOGRAM_EDGES.
    """

    mean: Real
    standard_error: Real | None
    median: Real
    p99: Real
    p999: Real
    maximum: Real
    by_position: tuple[PositionMean, ...]
    histogram: tuple[Count, ...]

    def __post_init__(self) -> None:
        if len(self.histogram) != len(HISTOGRAM_EDGES) + 1:
            raise ValueError(f"histogram has {len(self.histogram)} counts, not {len(HISTOGRAM_EDGES) + 1}")


@dataclass(frozen=True, slots=True)
class Figures:
    """One model against the reference, over all predicted tokens of all windows.

    `log_likelihood` is the model's log-likelihood of the text's next token less the reference's. `top1_agreement` is
    the share of tokens where both have the same most likely next token, `left_top5` the share where the reference's is
    not among the model's five most likely.
    """

    divergence: Divergence
    perplexity: Real
    reference_perplexity: Real
    log_likelihood: Mean
    top1_agreement: Share
    left_top5: Share


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """The hidden states after one layer: sum |h - h'|^2 / sum |h|^2, h being the reference's.

    `routing_agreement` is the share of the reference's choices of experts that the model makes too; None for a dense
    layer, or if it is not known which experts a pruned model has. A choice of an expert that a pruned model does not
    have does not agree.
    """

    relative_error: Real
    routing_agreement: Share | None


@dataclass(frozen=True, slots=True)
class WorstToken:
    """A token with a large divergence: the text before it, itself, and the most likely tokens of both models.

    `position` is that of the token itself in its window. The texts are those of the tokenizer, or token ids where there
    is none.
    """

    window: Count
    position: Count
    divergence: Real
    before: str
    token: str
    reference_token: str
    model_token: str


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A model: `name` is a folder's, an address, or an endpoint; `weights` the digest of its weights, None if served.

    `activations` is None for a model whose weights are not NVFP4. `kv_cache` is None for FP32.
    """

    name: str
    weights: Digest | None = None
    activations: Activations | None = None
    kv_cache: ServedKvCache | None = None


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One model against the reference. `layers` is empty for a served model."""

    model: EvaluatedModel
    figures: Figures
    layers: tuple[LayerFigures, ...] = ()
    worst: tuple[WorstToken, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """What was read: the names and digests of the texts, and the windows of token ids drawn from them.

    `token_ids` is the digest of the ids. `dropped` windows had hidden states that are not finite and count nowhere.
    """

    texts: tuple[tuple[str, Digest], ...]
    token_ids: Digest
    tokens: Count
    window: Count
    windows: Count
    seed: Count
    dropped: Count = 0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The content of evaluation.json, and what `evaluate --json` and `compare --json` print.

    `top_k` is how many log-probabilities of each token two servers gave: then every divergence is a lower bound.
    `noise` is the mean divergence of the reference's server from itself, asked twice.
    """

    format: Literal[1]
    kind: Literal["evaluate", "compare"]
    tool_version: Annotated[str, Field(alias="k2convert")]
    reference: EvaluatedModel
    text: EvaluationText
    rows: tuple[EvaluationRow, ...]
    top_k: Count | None = None
    noise: Real | None = None


def find_evaluation(path: Path) -> Evaluation | None:
    """Read a file, or a result's evaluation.json; None if there is none; raises MalformedFileError."""
    path = path / EVALUATION_NAME if path.is_dir() else path
    return read_document(Evaluation, path) if path.exists() else None


def check_fresh(evaluation: Evaluation, weights: str, *, folder: Path) -> None:
    """Refuse an evaluation of other weights than those with the digest `weights` (CheckpointError)."""
    if any(row.model.weights not in (None, weights) for row in evaluation.rows):
        raise CheckpointError(
            f"{folder / EVALUATION_NAME}: measures other weights than this folder has. Delete the file, or run "
            "`k2convert evaluate` again."
        )
