"""README.md, the card of a result: the report's sections, advice on serving, and metadata for the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.fit.search import gigabytes
from k2convert.fit.serving import ENGINE_NAMES, result_deployment, serve_command
from k2convert.hub.own_card import marked
from k2convert.hub.source_card import SourceCard, front_matter
from k2convert.models import find_family
from k2convert.models.names import CONVERTIBLE_ROLES, ModelCardFacts
from k2convert.quantize.rules import RULES
from k2convert.report.content import bits_words, caution, provenance, role_name, sections
from k2convert.report.figures import Report
from k2convert.report.render import code, escape, headline_block, joined_blocks, section_blocks, sentence

_KEEP_INPUT_SCALE: Final = (
    "**Keep `input_scale` at 1.0.** At run time, each block of 16 activations gets its own E4M3 scale. With 1.0, these "
    "scales hold activations up to 2,688. A smaller value clips rare large activations: on SmolLM2, 1/32 raises the KL "
    "divergence from 0.16 to 0.73. With a calibrated value, FlashInfer's unified MoE path returns outputs that are too "
    "large (flashinfer issue 3548)."
)
_SGLANG_SWITCHES: Final = (
    "SGLang can round activations with less error, by two environment variables. "
    "`SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1` gives each token its own scale. `FLASHINFER_NVFP4_4OVER6=1` lets "
    "each block use 4 or 6 as its largest value: on SmolLM2, the KL divergence falls from 0.161 to 0.149. Not every "
    "kernel reads them, so compare the answers."
)


def render_card(
    report: Report,
    *,
    base_model: str | None,
    source: SourceCard,
    config: Mapping[str, Any],
    picture: str,
    revision: str | None = None,
) -> str:
    """Return README.md. The report is named after the repository; `picture` is the name of its file there."""
    family = find_family(str(report.ledger.source.family)).card
    base = base_model or family.model_kind
    blocks = [
        f"---\n{_metadata(report, family, base_model, source)}\n---",
        f"# {escape(report.name.partition('/')[2])}",
        _first_sentence(report, family, base_model),
        headline_block(report),
        f"![Headline figures and charts]({picture})",
        *_converted(report, family),
        escape(caution(report)),
        *(f"> {sentence(line)}" for line in report.missing),
        *(block for section in sections(report) for block in section_blocks(section)),
        *_serving(report, family, config, base_model, revision),
        *_hardware(report),
        *section_blocks(provenance(report)),
        _origin(report, base),
    ]
    return marked(joined_blocks(blocks))


def _metadata(report: Report, family: ModelCardFacts, base_model: str | None, source: SourceCard) -> str:
    recipe = report.ledger.recipe
    tags = ["nvfp4", "fp4", *family.tags, recipe.layout, "vllm", "sglang"]
    if recipe.activations == "w4a4" and not LAYOUTS[recipe.layout].tensorrt_llm_note:
        tags.append("tensorrt-llm")
    return front_matter(
        source,
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        library_name=source.library_name or "transformers",
        pipeline_tag=source.pipeline_tag or ("image-text-to-text" if family.has_vision else "text-generation"),
        tags=[*tags, "k2convert"],
    )


def _first_sentence(report: Report, family: ModelCardFacts, base_model: str | None) -> str:
    base = f"{family.model_kind[0].upper()}{family.model_kind[1:]}"
    if base_model is not None:
        base = f"[{escape(base_model)}](https://huggingface.co/{quote(base_model)})"
    bits = "W4A16: 4-bit weights, 16-bit activations"
    if report.ledger.recipe.activations == "w4a4":
        bits = "W4A4: 4-bit weights and activations"
    return f"{base} with its {', '.join(map(role_name, report.ledger.recipe.roles))} converted to NVFP4 ({bits})."


def _converted(report: Report, family: ModelCardFacts) -> Iterator[str]:
    ledger = report.ledger
    recipe = ledger.recipe
    rule = RULES.get(recipe.rule)
    scales = recipe.input_scale
    is_w4a4 = recipe.activations == "w4a4"
    roles = ", ".join(map(role_name, recipe.roles))
    scale = "one power-of-two scale" if rule is not None and rule.has_power_of_two_scale else "one FP32 scale"
    kept = [*family.kept, *(role_name(role) for role in CONVERTIBLE_ROLES if role not in recipe.roles)]
    if family.has_vision:
        kept.append("vision tower and projector")
    lines = [f"To NVFP4 (E2M1 values, one E4M3 scale for every 16 weights, {scale} per tensor): {roles}"]
    if ledger.calibration is not None and ledger.calibration.exponents_digest is not None:
        lines.append(
            f"Kept in their formats: {', '.join(kept)}. They are byte for byte the source's, except for the powers of "
            "two of smoothing in router and shared experts"
        )
    else:
        lines.append(f"Kept byte for byte: {', '.join(kept)}")
    lines.append(f"Rule: {code(recipe.rule)}{'' if rule is None else f': {escape(rule.summary)}'}")
    if is_w4a4:
        uncalibrated = "; no calibration data were used" if ledger.calibration is None else ""
        lines.append(
            f"Activation scales: constant, {scales.gate_up} for gate and up, {scales.down} for down{uncalibrated}"
        )
    if recipe.kv_cache:
        lines.append("KV cache: declared FP8, scale 1.0")
    lines.append(f"Tensor names and config: {LAYOUTS[recipe.layout].title}")
    yield "## What was converted"
    yield "\n".join(f"- {line}" for line in lines)
    if is_w4a4 and scales.gate_up == scales.down == 1.0:
        yield _KEEP_INPUT_SCALE


def _serving(
    report: Report, family: ModelCardFacts, config: Mapping[str, Any], base_model: str | None, revision: str | None
) -> Iterator[str]:
    recipe = report.ledger.recipe
    deployment = result_deployment(
        config, recipe.kv_cache, family=str(report.ledger.source.family), model=report.name, revision=revision
    )
    commands = {name: serve_command(engine, deployment) for engine, name in ENGINE_NAMES.items()}
    yield "## Serving"
    yield "The engines read the quantization from `config.json`, so no option is needed for it."
    for engine, command in commands.items():
        yield f"{engine}:"
        if command.words:
            yield f"```bash\n{command.block}\n```"
        yield from command.notes
    yield LAYOUTS[recipe.layout].transformers_note
    if recipe.activations == "w4a4":
        yield _SGLANG_SWITCHES
    if heads := family.draft_heads.get((base_model or "").rpartition("/")[2], ()):
        yield (
            "For speculative decoding, this checkpoint needs no draft head inside: the engines load one from its own "
            "repository (vLLM: `--speculative-config`, SGLang: `--speculative-draft-model-path`). For this model: "
            f"{', '.join(map(code, heads))}. Measure how many drafts are accepted."
        )
    yield from family.notes
    notes = {note for command in commands.values() for note in command.notes}
    traits = (recipe.layout, recipe.activations, "pipeline")
    yield from (reason for _, trait, reason in family.refusals if trait in traits and reason not in notes)


def _hardware(report: Report) -> Iterator[str]:
    lines = ["Weight-only: activations stay in 16 bits on every GPU, including Blackwell."]
    if report.ledger.recipe.activations == "w4a4":
        lines = ["Blackwell (B200, B300, GB200, RTX PRO 6000) multiplies NVFP4 weights and activations in hardware."]
    lines += [
        "Hopper and older GPUs run it through Marlin kernels as weight-only: activations stay in 16 bits there.",
        f"It is not smaller than the {report.source_format.title} source: {bits_words(report.source_format)}. All "
        f"shards together need {gigabytes(report.ledger.num_bytes)}; leave room for the KV cache.",
    ]
    yield "## Hardware"
    yield "\n".join(f"- {line}" for line in lines)


def _origin(report: Report, base: str) -> str:
    commit = "a local copy, identified by its headers"
    if report.ledger.source.revision:
        commit = f"commit {code(report.ledger.source.revision)}"
    checked = "" if report.checks is None else f" Before publishing: {escape(report.checks.summary)}"
    return f"Source: {escape(base)}, {commit}.{checked}"
