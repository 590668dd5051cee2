"""README.md, the card of a result: the report's sections, advice on serving, and metadata for the Hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.deploy.memory import gigabytes
from k2convert.deploy.serving import ENGINE_NAMES, result_deployment, serve_command
from k2convert.hub.own_card import marked
from k2convert.hub.source_card import SourceCard, front_matter
from k2convert.models import find_family
from k2convert.models.names import CONVERTIBLE_ROLES, ModelCardFacts, Role
from k2convert.models.source_formats import INT4
from k2convert.quantize.rules import RULES
from k2convert.report.content import role_name
from k2convert.report.figures import Report
from k2convert.report.render import code, escape, render_text
from k2convert.report.wording import joined

_KEEP_INPUT_SCALE: Final = (
    "**Keep `input_scale` at 1.0.** At run time, each block of 16 activations gets its own E4M3 scale. With 1.0, these "
    "scales hold activations up to 2,688. A smaller value clips rare large activations. With a calibrated value, "
    "FlashInfer's unified MoE path returns outputs that are too large (flashinfer issue 3548)."
)
_SGLANG_SWITCHES: Final = (
    "SGLang can round activations differently, by two environment variables. "
    "`SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1` gives each token its own scale. With it, "
    "`FLASHINFER_NVFP4_4OVER6=1` lets each block use 4 or 6 as its largest value. Neither was run. Computed on "
    "SmolLM2, the second gains nothing beyond noise. Some kernels ignore both: compare outputs with and without them."
)

_INT4_IS_FASTER: Final = (
    "On RTX PRO 6000 the NVFP4 kernels are slow today, and the INT4 source is faster: on 8 of them, with an FP8 KV "
    "cache, one request of Kimi K2.5 got 53 to 55 tokens per second with NVFP4 in SGLang, and 79 with INT4 in vLLM "
    "(https://github.com/local-inference-lab/rtx6kpro). No such comparison is known on DGX Spark."
)


def render_card(
    report: Report,
    *,
    base_model: str | None,
    source: SourceCard,
    config: Mapping[str, Any],
    revision: str | None = None,
) -> str:
    """Return README.md. The report is named after the repository."""
    family = find_family(str(report.ledger.source.family)).card
    opening = (
        f"---\n{_metadata(report, family, base_model, source)}\n---",
        f"# {escape(report.name.partition('/')[2])}",
        _first_sentences(report, family, base_model),
    )
    advice = (*_serving(report, family, config, base_model, revision), *_hardware(report))
    return marked(render_text(report, opening, advice))


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


def _first_sentences(report: Report, family: ModelCardFacts, base_model: str | None) -> str:
    """Return what was converted, from what and how, and what was not."""
    recipe = report.ledger.recipe
    rule = RULES.get(recipe.rule)
    base = f"{family.model_kind[0].upper()}{family.model_kind[1:]}"
    if base_model is not None:
        base = f"[{escape(base_model)}](https://huggingface.co/{quote(base_model)})"
    bits = "W4A16: 4-bit weights, 16-bit activations"
    if recipe.activations == "w4a4":
        bits = "W4A4: 4-bit weights and activations"
    unquantized = [family.unquantized_attention if name in recipe.fp8 else name for name in family.unquantized]
    unquantized += (role_name(role) for role in CONVERTIBLE_ROLES if role not in (*recipe.roles, *recipe.fp8))
    if family.has_vision:
        unquantized.append("vision tower and projector")
    exceptions = ""
    if report.ledger.calibration is not None and report.ledger.calibration.exponents_digest is not None:
        scaled = ["the norm before the experts", "the router"]
        if Role.SHARED_EXPERTS not in (*recipe.roles, *recipe.fp8):
            scaled.append("gate and up of the shared experts")
        exceptions = (
            f". The exceptions are {joined(scaled)}: smoothing multiplied or divided their channels by powers of two"
        )
    scale = "one power-of-two scale" if rule is not None and rule.has_power_of_two_scale else "one FP32 scale"
    return (
        f"{base} with its {', '.join(map(role_name, recipe.roles))} converted to NVFP4 ({bits}): E2M1 values, one E4M3 "
        f"scale for every 16 weights, and {scale} per tensor. {_fp8_sentence(report)}Everything else is copied byte "
        f"for byte: {', '.join(unquantized)}{exceptions}.\n\n"
        f"Rule {code(recipe.rule)}{'' if rule is None else f': {escape(rule.summary)}'}"
    )


def _fp8_sentence(report: Report) -> str:
    recipe = report.ledger.recipe
    if not recipe.fp8:
        return ""
    names = joined([role_name(role) for role in recipe.fp8])
    scales = "one FP32 scale for each output row, and at run time one for each token"
    if find_family(str(report.ledger.source.family)).has_fp8_blocks:
        scales = (
            "one power-of-two scale for each block of 128 x 128 weights, and at run time one for every 128 inputs of a "
            "token"
        )
    return f"{names[0].upper()}{names[1:]} became FP8 (W8A8: 8-bit weights and activations): E4M3 values, {scales}. "


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
        if recipe.input_scale.gate_up == recipe.input_scale.down == 1.0:
            yield _KEEP_INPUT_SCALE
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
    yield "## Hardware"
    source_format = find_family(str(report.ledger.source.family)).source_format
    if report.ledger.recipe.activations == "w4a4":
        yield "Blackwell (B200, B300, GB200, RTX PRO 6000) multiplies NVFP4 weights and activations in hardware."
        if source_format is INT4:
            yield _INT4_IS_FASTER
    else:
        yield "Weight-only: activations stay in 16 bits on every GPU, including Blackwell."
    if report.ledger.recipe.fp8:
        yield (
            "Hopper and Blackwell multiply the FP8 layers in 8 bits. A token reads half of their bytes, which is a "
            "bound on the speed. No speed was measured."
        )
    yield (
        "Hopper and older GPUs run it through Marlin kernels as weight-only: activations stay in 16 bits there, and "
        f"the {source_format.title} source serves as well. All shards together need "
        f"{gigabytes(report.ledger.num_bytes)}; leave room for the KV cache."
    )
