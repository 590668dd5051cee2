"""The repository's README.md: what was converted, what it lost, how to serve it, where it comes from.

The page follows from typed facts that the caller reads from the ledger, the config and the source's own card, so
publishing a finished folder and streaming a job give the same page. huggingface_hub's ModelCard builds and checks it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.hub.card_calibration import CardCalibration, calibration_lines, feedback_paragraphs, outputs_paragraphs
from k2convert.hub.card_needs import CardNeeds, needs_section
from k2convert.hub.card_pruning import (
    CardPruning,
    described_base,
    pruning_section,
    pruning_tags,
    size_note,
)
from k2convert.hub.source_card import SourceCard, front_matter
from k2convert.quantize.metrics.weight_metrics import WeightMetrics

ROLE_NAMES = {
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP of the first layers",
    "total": "all converted weights",
}
_TRANSFORMERS_NOTE = (
    "transformers: use version 4 (tested with 4.57.6) and compressed-tensors 0.13 or later; 0.12 refuses this config. "
    "transformers 5 (tested with 5.23.0) drops the global scale of NVFP4 experts while loading, and answers wrongly."
)
_ENGINE_NAMES = {"modelopt": "`modelopt`", "compressed-tensors": "`compressed-tensors` (nvfp4-pack-quantized)"}


@dataclass(frozen=True, slots=True)
class CardCommand:
    """The command that serves the result with one engine, as lines for a shell, and notes about it."""

    engine: str
    command: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card is built from."""

    repo: str
    base_model: str | None
    recipe: Mapping[str, Any]
    """The resolved recipe."""
    totals: Mapping[str, WeightMetrics]
    """By role, with `total` for all roles."""
    revision: str | None
    """The source's commit on the Hub, or None if the source was a local folder."""
    tool_version: str
    versions: Mapping[str, str]
    """Versions of the libraries that took part, by name."""
    tensor_bytes: int
    """Size of all shard files together."""
    source: SourceCard
    picture: str | None
    model_kind: str
    """What to call the source without a base model's name, such as "a Kimi K2 model"."""
    tags: tuple[str, ...]
    """The family's tags on the Hub."""
    serving: tuple[CardCommand, ...]
    """How to serve it, an engine each."""
    kept: tuple[str, ...]
    """Names of what stayed byte for byte."""
    has_vision: bool
    rule_summary: str
    """One phrase that says what the rule does."""
    has_power_of_two_scale: bool
    """Whether the scale of each tensor is a power of two; otherwise it is any FP32 value."""
    checked: str
    """A sentence that says which rules were checked before publishing."""
    calibration: CardCalibration | None = None
    """What the result was calibrated with; None without calibration data."""
    needs: CardNeeds | None = None
    """Memory and GPUs; None if they are not known for this model."""
    pruning: CardPruning | None = None
    """Which part of the experts is kept; None for all."""

    @property
    def is_w4a4(self) -> bool:
        return self.recipe["activations"] == "w4a4"

    @property
    def is_modelopt(self) -> bool:
        return self.recipe["layout"] == "modelopt"

    @property
    def roles(self) -> str:
        return ", ".join(ROLE_NAMES.get(role, role) for role in cast(Iterable[str], self.recipe["roles"]))

    @property
    def base(self) -> str:
        link = f"[{self.base_model}](https://huggingface.co/{self.base_model})"
        return link if self.base_model else self.model_kind


def build_card(facts: CardFacts) -> str:
    """The whole README.md, front matter first."""
    from huggingface_hub import ModelCard

    sections = [_title(facts), pruning_section(facts.pruning), _conversion(facts), _error(facts), _serving(facts)]
    sections += [needs_section(facts.needs), _hardware(facts), _provenance(facts)]
    body = "\n\n".join(section.strip() for section in sections if section)
    return str(ModelCard(f"---\n{_front_matter(facts)}\n---\n\n{body}\n"))


def _front_matter(facts: CardFacts) -> str:
    engines = ["vllm", "sglang"] + (["tensorrt-llm"] if facts.is_modelopt and facts.is_w4a4 else [])
    return front_matter(
        facts.source,
        base_model=facts.base_model,
        base_model_relation="quantized" if facts.base_model else None,
        library_name=facts.source.library_name or "transformers",
        pipeline_tag=facts.source.pipeline_tag or ("image-text-to-text" if facts.has_vision else "text-generation"),
        tags=["nvfp4", "fp4", *facts.tags, facts.recipe["layout"], *engines, *pruning_tags(facts.pruning), "k2convert"],
    )


def _title(facts: CardFacts) -> str:
    name = facts.repo.partition("/")[2]
    width = "W4A4: 4-bit weights and activations" if facts.is_w4a4 else "W4A16: 4-bit weights, 16-bit activations"
    base = described_base(facts.base, facts.pruning)
    lines = [f"# {name}", f"{base[0].upper()}{base[1:]} its {facts.roles} converted to NVFP4 ({width})."]
    if facts.picture is not None:
        lines.append(f"![Error of the converted weights]({facts.picture})")
    return "\n\n".join(lines)


def _conversion(facts: CardFacts) -> str:
    recipe = facts.recipe
    inputs = cast(Mapping[str, Any], recipe.get("input_scale") or {})
    tensor_scale = "one power-of-two scale" if facts.has_power_of_two_scale else "one FP32 scale"
    lines = [
        f"- To NVFP4 (E2M1 codes, one E4M3 scale for every 16 weights, {tensor_scale} for each tensor): {facts.roles}",
        _kept(facts),
        f"- Rule: `{recipe['rule']}`: {facts.rule_summary}",
    ]
    if facts.is_w4a4:
        unused = "" if facts.calibration is not None else "; no calibration data were used"
        lines.append(
            f"- Activation scales: constant, {inputs.get('gate_up', 1.0):g} for gate and up, "
            f"{inputs.get('down', 1.0):g} for down{unused}"
        )
    lines += calibration_lines(facts.calibration)
    if recipe.get("kv_cache"):
        lines.append("- KV cache: declared FP8, scale 1.0")
    lines.append(f"- Tensor names and config: {_ENGINE_NAMES[recipe['layout']]}")
    return "\n\n".join(["## What was converted", "\n".join(lines), *feedback_paragraphs(facts.calibration)])


def _kept(facts: CardFacts) -> str:
    """Return the line about what was not converted."""
    kept = ", ".join(facts.kept)
    if facts.calibration is None or not facts.calibration.has_norm_scaling:
        return f"- Kept byte for byte: {kept}"
    return (
        f"- Kept in their formats: {kept}. They are byte for byte the source's, except for the powers of two of norm "
        "scaling in router and shared experts"
    )


def _error(facts: CardFacts) -> str:
    rows = [
        "| weights | number | SQNR | relative MSE | usual rule (`plain`) | bound | INT4 codes recoverable |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows += [
        _error_row(ROLE_NAMES.get(role, role), metrics)
        for role, metrics in facts.totals.items()
        if role != "total" or len(facts.totals) != 2  # the total of a single role is that role
    ]
    activations = (
        " Rounding activations to 4 bits at run time adds an error too, usually a larger one than this conversion does."
        if facts.is_w4a4
        else ""
    )
    outputs = "".join(f"{paragraph}\n\n" for paragraph in outputs_paragraphs(facts.calibration))
    comparison = _comparison(facts.totals.get("total"))
    return f"""
## What it lost

{outputs}Error of the stored weights against the exact values of the source:

{chr(10).join(rows)}

{comparison}`plain` dequantizes to BF16 and takes each block's scale from its largest weight.

**This is not lossless.** INT4 has sixteen evenly spaced levels. E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
It has no 5 and no 7, so blocks with these codes change. The figures above are of weights only.{activations}
"""


def _error_row(name: str, metrics: WeightMetrics) -> str:
    plain, bound = _decibels(metrics.sqnr_plain_db), _decibels(metrics.sqnr_bound_db)
    codes = (
        f"{metrics.recoverable_codes / metrics.num_codes:.2%}"
        if metrics.num_codes and metrics.recoverable_codes is not None
        else ""
    )
    return (
        f"| {name} | {metrics.num_weights:,} | {_decibels(metrics.sqnr_db) or 'exact'} | "
        f"{metrics.relative_mse:.5f} | {plain} | {bound} | {codes} |"
    )


def _comparison(total: WeightMetrics | None) -> str:
    """Our error next to that of `plain` and to the bound; empty if a ratio is not finite."""
    if total is None or not (math.isfinite(total.achieved_to_plain) and math.isfinite(total.achieved_to_bound)):
        return ""
    return (
        f"On sampled blocks the squared error is {total.achieved_to_plain:.3f} times that of `plain` and "
        f"{total.achieved_to_bound:.3f} times the bound. No choice of scales can do better than the bound. "
    )


def _decibels(sqnr_db: float | None) -> str:
    """Return an SQNR in words; empty if it is not known or not finite."""
    return "" if sqnr_db is None or not math.isfinite(sqnr_db) else f"{sqnr_db:.2f} dB"


def _serving(facts: CardFacts) -> str:
    blocks = ["The engines read the quantization from `config.json`, so no option is needed for it."]
    for serving in facts.serving:
        blocks += [f"{serving.engine}:\n\n```bash\n{serving.command}\n```", *serving.notes]
    if not facts.is_modelopt:
        blocks.append(_TRANSFORMERS_NOTE)
    return "\n\n".join(["## Serving", *blocks])


def _hardware(facts: CardFacts) -> str:
    total = facts.tensor_bytes
    size = f"{total / 1e9:,.0f} GB" if total >= 1e9 else f"{total / 1e6:,.1f} MB"
    native = (
        "- Blackwell (B200, B300, GB200, RTX PRO 6000) multiplies NVFP4 weights and activations in hardware."
        if facts.is_w4a4
        else "- Weight-only: activations stay in 16 bits on every GPU, including Blackwell."
    )
    return f"""
## Hardware

{native}
- Hopper and older GPUs run it through Marlin kernels as weight-only: activations stay in 16 bits there.
- {size_note(facts.pruning)} All shards
  together take {size}; leave room for the KV cache.
"""


def _provenance(facts: CardFacts) -> str:
    commit = f"commit `{facts.revision}`" if facts.revision else "a local copy, identified by its headers"
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    return f"""
## Provenance

- Source: {facts.base}, {commit}
- Before publishing: {facts.checked}
- Converter: k2convert {facts.tool_version} ({versions}), recipe `{facts.recipe["name"]}`
- `{LEDGER_NAME}` has the whole recipe, the digests of the source's headers, the blake3 of every shard, and all sums.
"""
