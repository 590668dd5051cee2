"""The content of a report: headline, sections and provenance, computed once for page, Markdown, picture and card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from k2convert.errors import counted
from k2convert.fit.memory import KV_BYTES, OVERHEAD_BYTES, UTILIZATION, Settings
from k2convert.fit.search import fewest_holders, fp8_and_bf16_tokens, gigabytes
from k2convert.models.names import SourceFormat
from k2convert.models.source_formats import NVFP4_BITS
from k2convert.quantize.formats.nvfp4 import BLOCKS_PER_GROUP, MAX_BYTE, MIN_NORMAL_BYTE, decode_e4m3
from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import IMATRIX_NOTE
from k2convert.records.document import plain, shown
from k2convert.records.ledger import TOTAL, metrics_document
from k2convert.report.calibrated import calibrated_sections, pruned_section
from k2convert.report.checks import Checks
from k2convert.report.evaluated import detail_sections, evaluation_section, headline_words
from k2convert.report.figures import Report
from k2convert.report.wording import Section, Table, decibels, percent, with_exponents

NOT_COUNTED: Final = "not counted"
_ROLE_NAMES: Final = {
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP of the first layers",
    TOTAL: "all converted weights",
}
_ROLE_COLUMNS: Final = (
    "role", "weights", "SQNR", "relative error", "error / max", "non-zero changed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure. `tone` is "", "good" or "bad"."""

    value: str
    label: str
    detail: str
    tone: str = ""


def headline(report: Report, checks: Checks | None) -> tuple[Tile, ...]:
    """Return the headline figures, the most important first."""
    total = report.total
    tiles = [] if report.evaluation is None else [Tile(*headline_words(report.evaluation, report.ledger.recipe))]
    if (found := report.ledger.calibration) is not None and found.gptq:
        if found.held_out:
            last = list(found.held_out.values())[-1]
            detail = f"after the last MoE layer, {found.measured_on}; {last.mse_error:.3g} by rule mse there"
            tone = "bad" if last.is_worse else ""
            tiles.append(Tile(f"{last.gptq_error:.3g}", "error of the outputs", detail, tone))
        else:
            tiles.append(Tile("not measured", "error of the outputs", found.measured_on))
    if total.weighted_sqnr_db is not None:
        detail = "errors weighted by the inputs that each column had in the calibration"
        tiles.append(Tile(decibels(total.weighted_sqnr_db), "weighted SQNR", detail))
    detail = f"of {total.num_weights:,} weights against the exact source; relative error {total.relative_mse:.5f}"
    tiles.append(Tile(decibels(total.sqnr_db), "SQNR", detail))
    if total.sampled_error_max > 0 and total.squared_error > 0 and report.rule != "max":
        tiles.append(Tile(f"{total.achieved_to_max:.3f} \u00d7", "max's error", "max calibration, the usual recipe"))
    if report.worst and total.squared_error > 0:
        worst = report.worst[0]
        tiles.append(Tile(decibels(worst.sqnr_db), "worst tensor", worst.place or "of all converted tensors"))
    if total.num_codes and total.recoverable_codes is not None:
        share = percent(total.recoverable_codes, total.num_codes)
        tiles.append(Tile(share, "INT4 codes recoverable", "rounding to the INT4 grid restores the source's code"))
    return (*tiles, *([] if checks is None else [_contract_tile(checks)]))


def _contract_tile(checks: Checks) -> Tile:
    failed, warned, skipped = (checks.numbers(verdict) for verdict in ("fail", "warn", "skipped"))
    if failed:
        which = ", ".join(map(str, failed))
        return Tile(f"{len(failed)} broken", "contract rules", f"do not serve it: rule {which}", tone="bad")
    if not checks.has_passed:
        return Tile("failed", "validation", "do not serve it: see what was compared", tone="bad")
    rest = [f"{len(warned)} with warnings"] if warned else []
    rest += [f"{len(skipped)} not checked"] if skipped else []
    detail = ", ".join(rest) or "for vLLM, SGLang and TensorRT-LLM; no engine was run"
    total = len(checks.rules)
    return Tile(f"{total - len(skipped)} of {total}", "contract rules hold", detail, tone="" if skipped else "good")


def bits_words(source: SourceFormat) -> str:
    """Return how many bits a weight has before and after."""
    if source.bits == NVFP4_BITS:
        return f"{source.title} and NVFP4 both have {source.bits:g} bits per weight"
    return f"{source.title} has {source.bits:g} bits per weight, NVFP4 {NVFP4_BITS:g}"


def caution(report: Report) -> str:
    """Return a paragraph about what the figures do not show."""
    total = report.total
    calibration = report.ledger.calibration
    pruning = report.ledger.pruning
    known = report.source_format
    exact = f"the exact {known.title} values"
    if total.num_codes not in (None, total.num_weights):
        exact += " (the BF16 values for BF16 sources)"
    is_scaled = calibration is not None and calibration.exponents_digest is not None
    exact += ", divided by the powers of two of smoothing" if is_scaled else ""
    space = "Only leaving out experts saves space"
    if pruning is None:
        space = "It does not save space"
    change = (
        "The conversion is not lossless: INT4 has sixteen evenly spaced levels, and E2M1 has no 5 and no 7, so blocks "
        "with these values change."
    )
    if (words := total.cast_words) is not None:
        change = f"Codes were copied and scales relabeled. {with_exponents(words)}"
    elif total.num_codes is None:
        change = f"Rule {report.rule} rounds each weight again, so values change. Rule mse would copy the codes."
    text = f"These are errors of weights against {exact}. {change} {space}: {bits_words(known)}."
    if calibration is not None and calibration.gptq:
        text += (
            " Rule gptq keeps the outputs of layers, not the weights, so its errors of weights are larger than "
            "those of rule mse. See the error after each layer."
        )
    elif calibration is not None and calibration.imatrix:
        text += f" {IMATRIX_NOTE}"
    if report.ledger.recipe.activations == "w4a4":
        text += " FP4 activations add error at run time, which "
        text += "smoothing makes smaller." if is_scaled else "does not depend on how the weights were converted."
    return text


def sections(report: Report) -> Iterator[Section]:
    """Yield the parts of the report below the headline, in order. Those with charts alone are for the page."""
    if (found := report.evaluation) is not None:
        yield evaluation_section(found, report.ledger.recipe)
        yield from detail_sections(found, report.ledger.recipe)
    yield from _chart_sections(report)
    yield Section("What happened to the weights", (), (role_table(report), counts_table(report.total)))
    if (pruning := report.ledger.pruning) is not None:
        yield pruned_section(pruning, report.checks)
    yield from calibrated_sections(report.ledger.calibration)
    if report.worst and report.total.squared_error > 0:
        rows = [
            (
                f"{t.place}: {t.module}" if t.place else t.module,
                decibels(t.sqnr_db),
                "" if t.sqnr_max_db is None else decibels(t.sqnr_max_db),
                "" if t.max_error_steps is None else f"{t.max_error_steps:.2f}",
                f"{100 * t.changed_share:.1f} %",
            )
            for t in report.worst
        ]
        columns = ("", "SQNR", "max", "largest error, steps", "non-zero changed")
        yield Section("Worst tensors", (), (Table(columns, rows),))
    if report.checks is not None:
        yield from _contract(report.checks)
    if (needs := needs_section(report)) is not None:
        yield needs
    yield Section("Provenance", (), (Table(("", ""), made_by(report), is_code=True),))


def _chart_sections(report: Report) -> Iterator[Section]:
    if report.has_distribution:
        title = "Every tensor"
        sentence = f"SQNR of {len(report.tensors):,} converted tensors."
        if report.rule != "max":
            title += ", compared with max"
            sentence += " Max calibration, the usual recipe, is measured on a sample of each tensor's rows."
        yield Section(title, (sentence,), charts=("distribution",))
    if report.maps:
        sentence = "One cell per tensor, one color scale for all three projections."
        yield Section("SQNR by layer and expert", (sentence,), charts=("heat_map",))
    yield Section(
        "Block scales",
        (
            "How often each E4M3 block scale was written. Every engine reads scales between 2⁻⁶ and 448 correctly; "
            "Hopper's kernels flush subnormal ones to zero. Blocks of zeros have scale 1.",
        ),
        charts=("block_scales",),
    )


def _contract(checks: Checks) -> Iterator[Section]:
    rows = [
        (str(rule.number), rule.verdict, f"{rule.count:,}" if rule.count else "", rule.title) for rule in checks.rules
    ]
    table = Table(("rule", "verdict", "count", "requirement"), rows)
    yield Section("Servable contract", (checks.summary, *checks.sentences), (table,), rules=checks.rules)
    if checks.layers:
        what = f"Error of the output of MoE blocks against {checks.against} in FP32."
        sentence = f"{what} Hidden states: {checks.hidden_states}."
        columns = ("layer", "computed with", "output SQNR", "cosine", "worst expert")
        yield Section("Reference layers", (sentence,), (Table(columns, checks.layers),))


def needs_section(report: Report) -> Section | None:
    """Return memory and GPUs; None if they are not known."""
    if (model := report.model) is None:
        return None
    fp8, bf16 = (f"{model.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    states = ""
    if model.state_bytes:
        states = f" Linear attention: {gigabytes(model.state_bytes)} of states per request."
    sentences = (
        f"Weights: {gigabytes(model.weights.num_bytes)}. KV cache: {fp8} bytes per token in FP8, {bf16} in BF16; "
        f"tensor parallelism does not divide it, decode context parallelism does.{states}",
        f"Computed from the headers, with {UTILIZATION:.0%} of each GPU's memory used and {gigabytes(OVERHEAD_BYTES)} "
        "assumed for activations, CUDA graphs and NCCL. `k2convert fit` computes other GPUs, layouts and lengths.",
    )
    rows = [
        (
            f"{holder.fit.layout.num_gpus} x {holder.gpu.title}",
            str(holder.fit.layout),
            gigabytes(holder.fit.weight_bytes),
            *(f"{count:,}" for count in fp8_and_bf16_tokens(model, holder, settings=Settings())),
        )
        for holder in fewest_holders(model)
    ]
    columns = ("GPUs", "layout", "weights on each", "KV tokens, FP8", "KV tokens, BF16")
    return Section("Needs", sentences, (Table(columns, rows),) if rows else ())


def role_name(role: str) -> str:
    """Return what people call a role of a recipe or of the totals."""
    return _ROLE_NAMES.get(role, role)


def role_table(report: Report) -> Table:
    """Return the errors of each role, and the total if there are several roles."""
    totals = report.ledger.totals
    is_weighted = report.total.weighted_error is not None
    num_roles = len(totals.keys() - {TOTAL})
    has_proof = report.total.lossless_tensors is not None
    rows = [
        (
            role_name(role),
            f"{m.num_weights:,}",
            decibels(m.sqnr_db),
            f"{m.relative_mse:.5f}",
            f"{m.achieved_to_max:.3f}" if m.sampled_error_max > 0 else "",
            percent(m.num_nonzero - m.equal_nonzero, m.num_nonzero),
            *(() if m.weighted_error is None else (decibels(m.weighted_sqnr_db),)),
            *((f"{m.lossless_tensors or 0:,} of {counted(m.cast_tensors or 0, 'tensor')}",) if has_proof else ()),
        )
        for role, m in totals.items()
        if role != TOTAL or num_roles != 1
    ]
    more = [*(["weighted SQNR"] if is_weighted else []), *(["lossless"] if has_proof else [])]
    return Table((*_ROLE_COLUMNS, *more), rows)


def counts_table(metrics: WeightMetrics) -> Table:
    """Return how many weights, blocks and groups changed or did not, and what the scales are."""
    changed = metrics.num_nonzero - metrics.equal_nonzero
    histogram = metrics.scale_histogram
    subnormal = sum(n for byte, n in histogram.items() if byte < MIN_NORMAL_BYTE)
    blocks = metrics.num_blocks
    codes = metrics.num_codes
    steps = ""
    if metrics.max_error_steps is not None:
        steps = f"{metrics.max_error_steps:.2f} INT4 steps"
    extremes = [b for b in (metrics.min_scale_byte, metrics.max_scale_byte) if b is not None]
    values = decode_e4m3(np.array(extremes, dtype=np.uint8)).tolist()
    of_source: tuple[tuple[str, ...], ...] = (
        _count("INT4 codes recoverable", metrics.recoverable_codes, codes, "round(w'/s) is the source's code"),
        _count("codes of magnitude 5 or 7", metrics.num_five_or_seven, codes, "E2M1 has neither with other integers"),
        _count("codes of -8", metrics.num_minus_eight, codes, "allowed, but never written by the model's training"),
        _count(
            "blocks clipped to the normal scales", metrics.blocks_outside_normal, blocks,
            "a scale below 2⁻⁶ or above 448 would have given less error",
        ),
        _count("tensors with a wide scale spread", metrics.scale_spread_exceeded, None, "INT4 scales differ by > 2¹³"),
        ("largest error of a weight", steps or NOT_COUNTED, "", "in steps of its INT4 grid"),
    )  # fmt: skip
    if (tensors := metrics.cast_tensors) is not None:
        below = "scales of the expert differ by > 2¹⁷"
        groups = blocks // BLOCKS_PER_GROUP
        of_source = (
            _count("tensors without a change", metrics.lossless_tensors, tensors, "by the written bytes, read back"),
            _count("tensors with rounded codes", metrics.below_window_tensors, tensors, below),
            _count(
                "groups with rounded codes", metrics.below_window_groups, groups, "rounded to the least block scale"
            ),
            _count("tensors with subnormal scales", metrics.subnormal_tensors, tensors, "exact, see below"),
            _count("groups of zeros", metrics.empty_groups, groups, "of 32 weights"),
        )
    rows = (
        _count("non-zero weights changed", changed, metrics.num_nonzero, "their value is not the source's"),
        _count("blocks reproduced exactly", metrics.equal_blocks, blocks, "all 16 values, blocks of zeros included"),
        *of_source,
        _count("blocks with a subnormal scale", subnormal, blocks, "Marlin kernels on Hopper flush them to zero"),
        _count("blocks at 448", histogram.get(MAX_BYTE, 0), blocks, "the largest scale"),
        ("block scales used", " to ".join(f"{v:g}" for v in values) or NOT_COUNTED, "", "smallest and largest"),
    )  # fmt: skip
    return Table(("", "count", "share", "meaning"), rows)


def _count(label: str, value: int | None, of: int | None, meaning: str) -> tuple[str, ...]:
    shown = NOT_COUNTED if value is None else f"{value:,}"
    return label, shown, percent(value, of) if of and value is not None else "", meaning


def made_by(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the known facts that identify the result, as (label, value)."""
    ledger = report.ledger
    recipe = report.ledger.recipe
    record = report.ledger.calibration
    source = ledger.source
    scales = recipe.input_scale
    calibrated_by: list[tuple[str, object]] = []
    if record is not None:
        texts = [(f"text {name} (blake3)", digest) for name, digest in record.texts]
        calibrated_by = [("statistics (blake3)", record.statistics), *texts, ("seed of the windows", record.seed)]
        calibrated_by.append(("smoothing exponents (blake3)", record.exponents_digest))
    rows = (
        ("report made (UTC)", report.made_on),
        ("source", source.repo),
        ("source revision", source.revision),
        ("source headers (blake3)", ledger.fingerprint.get("source_headers")),
        ("source family", source.family),
        ("recipe", recipe.name),
        ("rule", recipe.rule),
        ("roles", ", ".join(recipe.roles)),
        ("layout", recipe.layout),
        ("activations", recipe.activations),
        ("input scales", f"gate_up {scales.gate_up}, down {scales.down}"),
        ("KV cache", recipe.kv_cache),
        ("quantizer", recipe.quantizer),
        ("pruning", None if ledger.pruning is None else ledger.pruning.line),
        ("arithmetic version", ledger.fingerprint.get("arithmetic")),
        *calibrated_by,
        ("k2convert", ledger.tool_version),
        *ledger.versions.items(),
        ("shards", f"{report.finished_shards} of {report.num_shards}"),
    )
    return tuple((label, str(value)) for label, value in rows if value not in (None, ""))


def figures_document(report: Report) -> dict[str, Any]:
    """Return totals, worst tensors and contract as plain data, for --json; figures that are not finite become None."""
    contract = None
    ledger = report.ledger
    parts = {"calibration": ledger.calibration, "pruning": ledger.pruning, "evaluation": report.evaluation}
    if (checks := report.checks) is not None:
        contract = {
            "rules": len(checks.rules),
            "held": len(checks.numbers("pass")) + len(checks.numbers("warn")),
            "skipped": len(checks.numbers("skipped")),
            "failed": checks.numbers("fail"),
            "passed": checks.has_passed,
        }
    return {
        "complete": report.is_complete,
        "rule": report.rule,
        "totals": {role: metrics_document(metrics) for role, metrics in report.ledger.totals.items()},
        "worst": shown(report.worst),
        "contract": contract,
        "missing": list(report.missing),
        **{name: plain(part) for name, part in parts.items() if part is not None},
    }
