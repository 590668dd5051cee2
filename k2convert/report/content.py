"""The words and rows of a report, the same in the page and in the Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k2convert.quantize.metrics.weight_metrics import WeightMetrics
from k2convert.quantize.rules import WEIGHTED_NOTE
from k2convert.records.calibration import CalibrationRecord
from k2convert.report import pruning
from k2convert.report.calibration import facts
from k2convert.report.checks import Checks
from k2convert.report.feedback import feedback_totals
from k2convert.report.figures import Report, TensorFigures, scale_value
from k2convert.report.formatting import decibels, percent

NOT_COUNTED = "not counted"
TIMES = "\u00d7"
_SMALLEST_NORMAL_BYTE, _LARGEST_BYTE = 0x08, 0x7E


@dataclass(frozen=True, slots=True)
class Tile:
    """One headline figure. `tone` is "", "good" or "bad"."""

    value: str
    label: str
    detail: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """One count: what, how many, their share, and what it means."""

    label: str
    value: str
    share: str
    meaning: str


def headline(report: Report, checks: Checks | None) -> tuple[Tile, ...]:
    """Return the headline figures, the most important first."""
    total = report.total
    tiles = _outputs_tiles(report.provenance.calibration)
    if total.weighted_sqnr_db is not None:
        detail = "errors weighted by the inputs that each column had in the calibration"
        tiles.append(Tile(decibels(total.weighted_sqnr_db), "weighted SQNR", detail))
    tiles.append(
        Tile(
            decibels(total.sqnr_db),
            "SQNR",
            f"of {total.num_weights:,} weights against the exact source; relative error {total.relative_mse:.5f}",
        )
    )
    if total.sampled_error_plain > 0 and report.rule != "plain":
        tiles.append(
            Tile(f"{total.achieved_to_plain:.3f} {TIMES}", "plain's error", "plain: max calibration, the usual recipe")
        )
    if total.sampled_error_bound > 0:
        tiles.append(
            Tile(
                f"{total.achieved_to_bound:.3f} {TIMES}",
                "the bound's error",
                "no choice of scales, even real-valued, can do better",
            )
        )
    if report.worst:
        worst = report.worst[0]
        tiles.append(Tile(decibels(worst.sqnr_db), "worst tensor", worst.place or "of all converted tensors"))
    if total.num_codes and total.recoverable_codes is not None:
        share = percent(total.recoverable_codes, total.num_codes)
        tiles.append(Tile(share, "INT4 codes recoverable", "rounding to the INT4 grid restores the source's code"))
    if checks is not None:
        tiles.append(_contract_tile(checks))
    return tuple(tiles)


def _outputs_tiles(record: CalibrationRecord | None) -> list[Tile]:
    """Return the error of the layers' outputs as a tile, if the rule was `feedback`."""
    found = feedback_totals(record)
    if record is None or found is None:
        return []
    if found.last is None:
        return [Tile("not measured", "error of the outputs", record.measured_on)]
    detail = f"after the last MoE layer, {record.measured_on}; {found.last.optimal_error:.3g} by rule optimal there"
    tone = "bad" if found.last.is_worse else ""
    return [Tile(f"{found.last.feedback_error:.3g}", "error of the outputs", detail, tone)]


def _contract_tile(checks: Checks) -> Tile:
    verdicts = checks.verdicts
    if verdicts.failed:
        which = ", ".join(str(number) for number in verdicts.failed)
        return Tile(f"{len(verdicts.failed)} broken", "contract rules", f"do not serve it: rule {which}", "bad")
    if not checks.has_passed:
        return Tile("failed", "validation", "do not serve it: see what was compared", "bad")
    rest = [f"{verdicts.warned} with warnings"] if verdicts.warned else []
    rest += [f"{verdicts.skipped} not checked"] if verdicts.skipped else []
    detail = ", ".join(rest) or "for vLLM, SGLang and TensorRT-LLM; no engine was run"
    tone = "good" if verdicts.held == verdicts.total else ""
    return Tile(f"{verdicts.held} of {verdicts.total}", "contract rules hold", detail, tone)


def counts(metrics: WeightMetrics) -> tuple[Count, ...]:
    """Return the counts of what happened to the weights."""
    changed = metrics.num_nonzero - metrics.equal_nonzero
    histogram = dict(metrics.scale_histogram)
    subnormal = sum(n for byte, n in histogram.items() if byte < _SMALLEST_NORMAL_BYTE)
    blocks, codes = metrics.num_blocks, metrics.num_codes
    steps = "" if metrics.max_error_steps is None else f"{metrics.max_error_steps:.2f} INT4 steps"
    extremes = [scale_value(b) for b in (metrics.min_scale_byte, metrics.max_scale_byte) if b is not None]
    return (
        _count("non-zero weights changed", changed, metrics.num_nonzero, "the conversion is not lossless"),
        _count("blocks reproduced exactly", metrics.equal_blocks, blocks, "all 16 values, blocks of zeros included"),
        _count("INT4 codes recoverable", metrics.recoverable_codes, codes, "round(w'/s) is the source's code"),
        _count("codes of magnitude 5 or 7", metrics.num_five_or_seven, codes, "E2M1 has neither with other integers"),
        _count("codes of -8", metrics.num_minus_eight, codes, "allowed, but never written by the model's training"),
        _count(
            "blocks clipped to the normal scales", metrics.blocks_outside_normal, blocks,
            "a scale below 2⁻⁶ or above 448 would have given less error",
        ),
        _count("blocks with a subnormal scale", subnormal, blocks, "Marlin kernels on Hopper flush them to zero"),
        _count("blocks at 448", histogram.get(_LARGEST_BYTE, 0), blocks, "the largest scale"),
        _count("tensors with a wide scale spread", metrics.scale_spread_exceeded, None, "INT4 scales differ by > 2¹³"),
        Count("largest error of a weight", steps or NOT_COUNTED, "", "in steps of its INT4 grid"),
        Count("block scales used", " to ".join(f"{v:g}" for v in extremes) or NOT_COUNTED, "", "smallest and largest"),
    )  # fmt: skip


def _count(label: str, value: int | None, of: int | None, meaning: str) -> Count:
    if value is None:
        return Count(label, NOT_COUNTED, "", meaning)
    return Count(label, f"{value:,}", percent(value, of) if of else "", meaning)


_ROLE_COLUMNS = ("role", "weights", "SQNR", "relative error", "error / plain", "error / bound", "non-zero changed")


def role_columns(report: Report) -> tuple[str, ...]:
    """Return the columns of `role_rows`."""
    return (*_ROLE_COLUMNS, *(("weighted SQNR",) if report.total.weighted_error is not None else ()))


def role_rows(report: Report) -> list[tuple[str, ...]]:
    """Return one row per role, and the total if there are several roles."""
    roles = [role for role in report.totals if role != "total"]
    return [_role_row(role, report.totals[role]) for role in (roles if len(roles) == 1 else [*roles, "total"])]


def _role_row(role: str, metrics: WeightMetrics) -> tuple[str, ...]:
    return (
        role.replace("_", " "),
        f"{metrics.num_weights:,}",
        decibels(metrics.sqnr_db),
        f"{metrics.relative_mse:.5f}",
        f"{metrics.achieved_to_plain:.3f}" if metrics.sampled_error_plain > 0 else "",
        f"{metrics.achieved_to_bound:.3f}" if metrics.sampled_error_bound > 0 else "",
        percent(metrics.num_nonzero - metrics.equal_nonzero, metrics.num_nonzero),
        *(() if metrics.weighted_error is None else (decibels(metrics.weighted_sqnr_db),)),
    )


WORST_COLUMNS = ("tensor", "SQNR", "plain", "bound", "largest error, steps", "non-zero changed")


def worst_rows(tensors: Sequence[TensorFigures]) -> list[tuple[str, ...]]:
    """Return one row per tensor, without its name; a cell is empty if a figure was not recorded."""
    return [
        (
            decibels(t.sqnr_db),
            "" if t.sqnr_plain_db is None else decibels(t.sqnr_plain_db),
            "" if t.sqnr_bound_db is None else decibels(t.sqnr_bound_db),
            "" if t.max_error_steps is None else f"{t.max_error_steps:.2f}",
            f"{100 * t.changed_share:.1f} %",
        )
        for t in tensors
    ]


def made_by(report: Report) -> tuple[tuple[str, str], ...]:
    """Return the known facts that identify the result, as (label, value)."""
    source, recipe = report.provenance, report.provenance.recipe
    header_digest = report.provenance.fingerprint.get("source_headers")
    scales = recipe.get("input_scale")
    rows = (
        ("report made (UTC)", report.made_on or None),
        ("source", source.repo),
        ("source revision", source.revision),
        ("source headers (blake3)", header_digest),
        ("source family", source.family),
        ("recipe", recipe.get("name")),
        ("rule", recipe.get("rule")),
        ("roles", ", ".join(str(role) for role in recipe["roles"]) if isinstance(recipe.get("roles"), list) else None),
        ("layout", recipe.get("layout")),
        ("activations", recipe.get("activations")),
        ("input scales", ", ".join(f"{k} {v}" for k, v in scales.items()) if isinstance(scales, dict) else None),  # type: ignore[reportUnknownVariableType]
        ("KV cache", recipe.get("kv_cache")),
        ("quantizer", recipe.get("quantizer")),
        ("experts kept", None if source.pruning is None else pruning.words(source.pruning)),
        ("arithmetic version", report.provenance.fingerprint.get("arithmetic")),
        *facts(source.calibration),
        *((name, version) for name, version in source.versions.items()),
        ("shards", f"{report.finished_shards} of {report.num_shards}"),
    )
    return tuple((label, str(value)) for label, value in rows if value is not None)


def caution(report: Report) -> str:
    """Return a paragraph about what the figures do not say."""
    total = report.total
    exact = "the exact INT4 values q * s"
    if total.num_codes != total.num_weights:
        exact += " (the BF16 values for BF16 sources)"
    calibration = report.provenance.calibration
    is_scaled = calibration is not None and calibration.exponents_digest is not None
    if is_scaled:
        exact += ", divided by the powers of two of norm scaling"
    space = "It does not save space" if report.provenance.pruning is None else "Only leaving out experts saves space"
    text = (
        f"These are errors of weights against {exact}. The conversion is not lossless: E2M1 has no 5 and no 7. "
        f"{space}: INT4 and NVFP4 both take 4.5 bits per weight."
    )
    if calibration is not None and calibration.feedback:
        text += (
            " Rule feedback keeps the outputs of layers, not the weights, so its errors of weights are larger than "
            "those of rule optimal. See the error after each layer."
        )
    elif calibration is not None and calibration.weighted:
        text += f" {WEIGHTED_NOTE}"
    if report.provenance.recipe.get("activations") == "w4a4":
        text += " FP4 activations add error at run time, which "
        text += "norm scaling makes smaller." if is_scaled else "does not depend on how the weights were converted."
    return text
