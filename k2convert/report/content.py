"""The content of a report: headline, caution, sections and provenance, the same for page, report.md and model card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from k2convert.errors import counted
from k2convert.fit.memory import KV_BYTES, OVERHEAD_BYTES, UTILIZATION, Settings
from k2convert.fit.search import fewest_holders, fp8_and_bf16_tokens, gigabytes
from k2convert.models.names import SourceFormat
from k2convert.models.source_formats import NVFP4_BITS
from k2convert.records.document import plain, shown
from k2convert.records.ledger import TOTAL, metrics_document
from k2convert.report.checks import Checks
from k2convert.report.evaluated import calibration_section, divergence_figure, evaluation_sections, held_out_figure
from k2convert.report.figures import Report
from k2convert.report.wording import Figure, Section, Table, decibels, percent, with_exponents

_ROLE_NAMES: Final = {
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP of the first layers",
    TOTAL: "all converted weights",
}
_ROLE_COLUMNS: Final = ("role", "weights", "SQNR", "relative error", "error / max", "non-zero changed")


def headline(report: Report) -> tuple[Figure, ...]:
    """Return the verdict of the contract and the headline figures, the most important first."""
    total = report.total
    figures = [] if report.checks is None else [contract_figure(report.checks)]
    if report.evaluation is not None:
        figures.append(divergence_figure(report.evaluation, report.ledger.recipe))
    if (calibration := report.ledger.calibration) is not None and calibration.gptq:
        figures.append(held_out_figure(calibration))
    detail = f"of {total.num_weights:,} weights against the exact source; relative error {total.relative_mse:.5f}"
    figures.append(Figure(decibels(total.sqnr_db), "SQNR", detail))
    if total.sampled_error_max > 0 and total.squared_error > 0 and report.rule != "max":
        figures.append(Figure(f"{total.achieved_to_max:.3f}", "of max's error", "max calibration is the usual recipe"))
    if report.worst and total.squared_error > 0:
        worst = report.worst[0]
        figures.append(Figure(decibels(worst.sqnr_db), "worst tensor", worst.place or "of all converted tensors"))
    if total.num_codes and total.recoverable_codes is not None:
        share = percent(total.recoverable_codes, total.num_codes)
        detail = "rounding to the INT4 grid restores the source's code"
        figures.append(Figure(share, "INT4 codes recoverable", detail))
    return tuple(figures)


def contract_figure(checks: Checks) -> Figure:
    """Return the verdict of the contract: a rule that was not checked does not count as held."""
    failed, warned, skipped = (checks.numbers(verdict) for verdict in ("fail", "warn", "skipped"))
    if failed:
        return Figure(f"{len(failed)} broken", "contract rules", f"do not serve it: rule {', '.join(map(str, failed))}")
    if not checks.has_passed:
        return Figure("failed", "validation", "do not serve it: see what was compared")
    rest = [f"{len(warned)} with warnings"] if warned else []
    rest += [f"{len(skipped)} not checked"] if skipped else []
    detail = ", ".join(rest) or "for vLLM, SGLang and TensorRT-LLM; no engine was run"
    total = len(checks.rules)
    return Figure(f"{total - len(skipped)} of {total}", "contract rules hold", detail)


def bits_words(source: SourceFormat) -> str:
    """Return how many bits a weight has before and after."""
    if source.bits == NVFP4_BITS:
        return f"{source.title} and NVFP4 both have {source.bits:g} bits per weight"
    return f"{source.title} has {source.bits:g} bits per weight, NVFP4 {NVFP4_BITS:g}"


def caution(report: Report) -> str:
    """Return a paragraph about what the figures do not show."""
    total = report.total
    calibration = report.ledger.calibration
    known = report.source_format
    exact = f"the exact {known.title} values"
    if total.num_codes not in (None, total.num_weights):
        exact += " (the BF16 values for BF16 sources)"
    is_scaled = calibration is not None and calibration.exponents_digest is not None
    exact += ", divided by the powers of two of smoothing" if is_scaled else ""
    change = (
        "The conversion is not lossless: INT4 has sixteen evenly spaced levels, and E2M1 has no 5 and no 7, so blocks "
        "with these values change."
    )
    if (words := total.cast_words) is not None:
        change = f"Codes were copied and scales relabeled. {with_exponents(words)}"
    elif total.num_codes is None:
        change = f"Rule {report.rule} rounds each weight again, so values change. Rule mse would copy the codes."
    text = f"These are errors of weights against {exact}. {change} It does not save space: {bits_words(known)}."
    if calibration is not None and calibration.gptq:
        text += (
            " Rule gptq keeps the outputs of layers, not the weights, so its errors of weights are larger than "
            "those of rule mse. See the error after each layer."
        )
    if report.ledger.recipe.activations == "w4a4":
        text += " FP4 activations add error at run time, which "
        text += "smoothing makes smaller." if is_scaled else "does not depend on how the weights were converted."
    return text


def sections(report: Report) -> Iterator[Section]:
    """Yield the parts of the report below the headline, in order. The card has them too."""
    recipe = report.ledger.recipe
    if report.evaluation is not None:
        yield from evaluation_sections(report.evaluation, recipe)
    if report.ledger.calibration is not None:
        yield calibration_section(report.ledger.calibration)
    sentence = (
        "Against the exact values of the source. Max is the usual recipe: every block gets its largest weight over 6 "
        "as scale. Its error is measured on a sample of every tensor."
    )
    if (steps := report.total.max_error_steps) is not None:
        sentence += f" The largest error of a weight is {steps:.2f} steps of its INT4 grid."
    yield Section("Error of the weights", (sentence,), (_role_table(report),), charts=("tensors",))
    if report.maps:
        sentence = "One cell per tensor, one color scale for all three projections. Darker means more error."
        yield Section("Error by layer and expert", (sentence,), charts=("heat_map",))
    if report.worst and report.total.squared_error > 0:
        yield _worst_tensors(report)
    if report.checks is not None:
        yield from _contract(report.checks)
    if (needs := needs_section(report)) is not None:
        yield needs


def _worst_tensors(report: Report) -> Section:
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
    columns = ("tensor", "SQNR", "max", "largest error, steps", "non-zero changed")
    return Section("Worst tensors", (), (Table(columns, rows),))


def _contract(checks: Checks) -> Iterator[Section]:
    rows = [
        (
            str(rule.number),
            rule.verdict,
            f"{rule.count:,}" if rule.count else "",
            f"{rule.title} ({rule.note})" if rule.note else rule.title,
        )
        for rule in checks.rules
    ]
    offenders = [(str(rule.number), o.name, o.problem) for rule in checks.rules for o in rule.offenders]
    tables = [Table(("rule", "where", "problem"), offenders)] if offenders else []
    tables.append(Table(("rule", "verdict", "count", "requirement"), rows, summary=f"Rules ({len(rows)})"))
    yield Section("Servable contract", (checks.summary, *checks.sentences), tables)
    if checks.layers:
        sentence = f"Error of the output of MoE blocks against INT4 in FP32. Hidden states: {checks.hidden_states}."
        columns = ("layer", "computed with", "output SQNR", "cosine", "worst expert")
        yield Section("Reference layers", (sentence,), (Table(columns, checks.layers),))


def needs_section(report: Report) -> Section | None:
    """Return memory and GPUs; None if they are not known."""
    if (model := report.model) is None:
        return None
    fp8, bf16 = (f"{model.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    states = f" Linear attention: {gigabytes(model.state_bytes)} of states per request." if model.state_bytes else ""
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


def _role_table(report: Report) -> Table:
    """Return the errors of each role, and the total if there are several roles."""
    totals = report.ledger.totals
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
            *((f"{m.lossless_tensors or 0:,} of {counted(m.cast_tensors or 0, 'tensor')}",) if has_proof else ()),
        )
        for role, m in totals.items()
        if role != TOTAL or num_roles != 1
    ]
    return Table((*_ROLE_COLUMNS, *(["lossless"] if has_proof else [])), rows)


def provenance(report: Report) -> Section:
    """Return the known facts that identify the result."""
    ledger = report.ledger
    recipe = ledger.recipe
    source = ledger.source
    scales = recipe.input_scale
    record = ledger.calibration
    texts = () if record is None else record.texts
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
        ("arithmetic version", ledger.fingerprint.get("arithmetic")),
        *((f"text {name} (blake3)", digest) for name, digest in texts),
        ("seed of the windows", None if record is None else record.seed),
        ("k2convert", ledger.tool_version),
        *ledger.versions.items(),
        ("shards", f"{report.finished_shards} of {report.num_shards}"),
    )
    known = tuple((label, str(value)) for label, value in rows if value not in (None, ""))
    sentence = "`k2convert.json` has the recipe, the digests of the source's headers and of every shard, and all sums."
    return Section("Provenance", (sentence,), (Table(("fact", "value"), known, is_code=True),))


def figures_document(report: Report) -> dict[str, Any]:
    """Return totals, worst tensors and contract as plain data, for --json; figures that are not finite become None."""
    contract = None
    parts = {"calibration": report.ledger.calibration, "evaluation": report.evaluation}
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
