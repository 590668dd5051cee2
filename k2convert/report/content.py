"""The content of a report, the same for page, report.md and model card: headline figures, sections and provenance.

A mode is how the same weights were computed in an evaluation: with which activations and which KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import median_low
from typing import Final

from k2convert.check.results import ValidationReport, Verdict, WeightsReport
from k2convert.deploy.gpus import H200_OVERHEAD_BYTES, OVERHEAD_BYTES
from k2convert.deploy.memory import KV_BYTES, UTILIZATION, fewest_holders, gigabytes
from k2convert.errors import counted, exact_zero, format_decibels, quoted, shortened
from k2convert.models.source_formats import NVFP4_BITS
from k2convert.plan.recipe import Recipe
from k2convert.records.calibration import MIN_TOKENS, CalibrationRecord, LayerCalibration
from k2convert.records.evaluation import Evaluation, EvaluationRow, WorstToken
from k2convert.records.ledger import TOTAL, shown_totals
from k2convert.report.figures import Report
from k2convert.report.wording import Figure, Section, Table, joined, last_part, percent, with_error

_ROLE_NAMES: Final = {
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP of the first layers",
    TOTAL: "all converted weights",
}
_MOST_BEFORE: Final = 60  # characters of the text before a token


def role_name(role: str) -> str:
    """Return what people call a role of a recipe or of the totals."""
    name, comma, form = role.partition(", ")
    return f"{_ROLE_NAMES.get(name, name)}{comma}{form}"


def headline(report: Report) -> tuple[Figure, ...]:
    """Return the verdict of the contract and the headline figures, the most important first."""
    total = report.total
    figures = [] if report.validation is None else [contract_figure(report.validation)]
    if report.evaluation is not None:
        mode, row = mode_rows(report.evaluation, report.ledger.recipe)[0]
        divergence = row.figures.divergence
        error = "" if divergence.standard_error is None else f"± {divergence.standard_error:.2g} "
        detail = f"{error}nats per token, {mode}, against {_reference(report.evaluation)}"
        figures.append(Figure(f"{divergence.mean:.3g}", "KL divergence", detail))
    if (calibration := report.ledger.calibration) is not None and calibration.gptq:
        figures.append(_held_out_figure(calibration))
    form = "NVFP4 " if report.ledger.recipe.fp8 else ""
    error = exact_zero(total.relative_mse)
    detail = f"of {total.num_weights:,} {form}weights against the exact source; relative MSE {error}"
    figures.append(Figure(format_decibels(total.sqnr_db), "SQNR", detail))
    if total.sampled_error_max > 0 and total.squared_error > 0 and report.rule != "max":
        detail = "max calibration, the usual recipe"
        figures.append(Figure(f"{total.achieved_to_max:.3f}", "times the squared error of rule max", detail))
    if report.worst and total.squared_error > 0:
        worst = report.worst[0]
        detail = worst.location or "of all converted tensors"
        figures.append(Figure(format_decibels(worst.sqnr_db), "worst tensor", detail))
    if total.num_codes and total.recoverable_codes is not None:
        share = percent(total.recoverable_codes, total.num_codes)
        detail = "when the result is rounded to the source's INT4 grid"
        figures.append(Figure(share, "of the weights get their INT4 code back", detail))
    return tuple(figures)


def contract_figure(validation: ValidationReport) -> Figure:
    """Return the verdict of the contract: a rule that was not checked does not count as held."""
    contract = validation.contract
    failed = contract.failed
    if failed:
        return Figure(f"{len(failed)} broken", "contract rules", f"do not serve it: rule {', '.join(map(str, failed))}")
    if not validation.passed:
        return Figure("failed", "validation", "do not serve it: see what was compared")
    num_warned = [rule.verdict for rule in contract.rules].count(Verdict.WARN)
    num_skipped = len(contract.unchecked)
    rest = [f"{num_warned} with warnings"] if num_warned else []
    rest += [f"{num_skipped} not checked"] if num_skipped else []
    detail = ", ".join(rest) or "most are those of vLLM, SGLang and TensorRT-LLM; no engine was run"
    total = len(contract.rules)
    return Figure(f"{total - num_skipped} of {total}", "contract rules hold", detail)


def _held_out_figure(record: CalibrationRecord) -> Figure:
    if not record.held_out:
        return Figure("not measured", "output error", record.measured_on)
    last = list(record.held_out.values())[-1]
    detail = f"after the last MoE layer, {record.measured_on}; {last.mse_error:.3g} with rule mse there"
    return Figure(f"{last.gptq_error:.3g}", "output error", detail)


def caution(report: Report) -> str:
    """Return a paragraph about what the figures do not show."""
    total = report.total
    source = report.source_format
    calibration = report.ledger.calibration
    is_scaled = calibration is not None and calibration.exponents_digest is not None
    exact = f"the exact {source.title} values"
    if total.num_codes not in (None, total.num_weights):
        exact += " (the BF16 values for BF16 sources)"
    if is_scaled:
        exact += ", divided by the powers of two of smoothing"
    change = (
        "The conversion is not lossless: INT4 has sixteen evenly spaced levels, E2M1 has no 5 and no 7, and its scales "
        "have 8 bits. So almost every weight changes a little."
    )
    if (words := total.cast_words) is not None:
        change = f"Codes were copied and scales relabeled. {words}"
    elif total.num_codes is None:
        change = f"Rule {report.rule} rounds each weight again, so values change. Rule mse would copy the codes."
    bits = f"{source.title} has {source.bits:g} bits per weight, NVFP4 {NVFP4_BITS:g}"
    if source.bits == NVFP4_BITS:
        bits = f"{source.title} and NVFP4 both have {source.bits:g} bits per weight"
    size = f"The result is no smaller than the source: {bits}."
    if report.ledger.recipe.fp8:
        size = f"The 4-bit weights are no smaller than the source's: {bits}. What became FP8 has half of its bytes."
    text = f"These are errors of weights against {exact}. {change} {size}"
    if calibration is not None and calibration.gptq:
        text += (
            " Rule gptq preserves the outputs of layers, not the weights, so its weight errors are usually larger "
            "than those of rule mse. See the error after each layer."
        )
    if report.ledger.recipe.activations == "w4a4":
        text += " FP4 activations add error at run time, "
        text += "which smoothing reduces." if is_scaled else "however the weights were converted."
    return text


def sections(report: Report) -> Iterator[Section]:
    """Yield the parts of the report below the headline, in order. The card has them too."""
    if report.evaluation is not None:
        yield from _evaluation(report.evaluation, report.ledger.recipe)
    if report.ledger.calibration is not None:
        yield _calibration(report.ledger.calibration)
    yield _weight_errors(report)
    if report.worst and report.total.squared_error > 0:
        yield _worst_tensors(report)
    if report.validation is not None:
        yield _contract(report.validation)
    if (needs := needs_section(report)) is not None:
        yield needs


def mode_rows(evaluation: Evaluation, recipe: Recipe) -> list[tuple[str, EvaluationRow]]:
    """Return the rows with the words for their modes, the mode that the result declares first.

    The words are ours: charts cannot show a name from a file.
    """

    def differs(row: EvaluationRow) -> tuple[bool, bool]:
        model = row.model
        return model.activations != recipe.activations, (model.kv_cache == "fp8") != (recipe.kv_cache == "fp8")

    return [(row.model.mode or "as stored", row) for row in sorted(evaluation.rows, key=differs)]


def _evaluation(evaluation: Evaluation, recipe: Recipe) -> Iterator[Section]:
    """Yield figures by mode, hidden states and routing by layer, and the tokens that differ most, where measured."""
    rows = mode_rows(evaluation, recipe)
    modes = [mode for mode, _ in rows]
    table = Table(("", *modes), _mode_figures([row for _, row in rows]))
    yield Section("Evaluation of the whole model", tuple(_evaluation_sentences(evaluation, rows)), (table,))
    if any(row.layers for _, row in rows):
        yield Section(
            "Hidden states after each layer",
            (
                "Relative squared error of the hidden states, |h - h'|² over |h|², summed over all tokens; h are the "
                "reference's. The error of a layer contains those of the layers before it.",
                "Same experts: the share of the reference's choices of experts that the model makes too.",
            ),
            (_by_layer(rows),),
        )
    columns = ("KL", "text before", "token", "reference expects", "model expects", "window: position")
    tables: list[Table] = []
    for mode, row in rows:
        if row.worst:
            cells = [_worst_token(token) for token in row.worst]
            tables.append(Table(columns, cells, words=(1, 2, 3, 4), summary=mode if tables else ""))
    if tables:
        sentence = f"The largest KL of single tokens, {modes[0]}. ␣ is a space in a token."
        yield Section("Tokens that differ most", (sentence,), tables)


def _evaluation_sentences(evaluation: Evaluation, rows: Sequence[tuple[str, EvaluationRow]]) -> Iterator[str]:
    text = evaluation.text
    names = joined([shortened(last_part(name)) for name, _ in text.texts]) or "a text"
    means = ", ".join(f"{_divergence(row)} ({mode})" for mode, row in rows)
    yield (
        f"Measured on {counted(text.tokens, 'token')} of {names} ({counted(text.windows, 'window')} of "
        f"{text.window:,}) against {_reference(evaluation)}: KL {means}."
    )
    if text.dropped:
        yield f"Windows left out because their hidden states were not finite: {text.dropped:,}."
    yield (
        "KL(reference || model) of the next token is in nats, ± one standard error over windows; 0 is no difference. "
        "It ranks conversions of one model. It does not predict task scores: run your own benchmarks."
    )


def _reference(evaluation: Evaluation) -> str:
    name = evaluation.reference.name
    return shortened(name if "://" in name else last_part(name))


def _mode_figures(rows: Sequence[EvaluationRow]) -> list[tuple[str, ...]]:
    figures = [row.figures for row in rows]
    kl = [model.divergence for model in figures]
    likelihoods = [model.log_likelihood for model in figures]
    return [
        ("KL, mean", *map(_divergence, rows)),
        ("KL, median", *(f"{model.median:.3g}" for model in kl)),
        ("KL, 99 % of tokens below", *(f"{model.p99:.3g}" for model in kl)),
        ("KL, 99.9 % of tokens below", *(f"{model.p999:.3g}" for model in kl)),
        ("KL, largest", *(f"{model.maximum:.3g}" for model in kl)),
        ("perplexity", *(f"{model.perplexity:.6g}" for model in figures)),
        ("perplexity of the reference", *(f"{model.reference_perplexity:.6g}" for model in figures)),
        ("log-likelihood minus the reference's", *(with_error(mean.mean, mean.standard_error) for mean in likelihoods)),
        ("same most likely token", *(_share(model.top1_agreement) for model in figures)),
        ("reference's token not in the top 5", *(_share(model.left_top5) for model in figures)),
    ]


def _divergence(row: EvaluationRow) -> str:
    return with_error(row.figures.divergence.mean, row.figures.divergence.standard_error)


def _share(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f} %"


def _by_layer(rows: Sequence[tuple[str, EvaluationRow]]) -> Table:
    columns = [name for mode, _ in rows for name in (f"error, {mode}", f"same experts, {mode}")]
    lines: list[list[str]] = []
    for number, layers in enumerate(zip_longest(*(row.layers for _, row in rows))):
        cells = [str(number)]
        for layer in layers:
            cells += ("", "") if layer is None else (f"{layer.relative_error:.3g}", _share(layer.routing_agreement))
        lines.append(cells)
    return Table(("layer", *columns), lines, words=(), summary=f"Layers ({len(lines)})")


def _worst_token(token: WorstToken) -> tuple[str, ...]:
    """Return a row with the texts in quotes, cut and with an escape for what is not seen."""
    tokens = [text.replace(" ", "␣") for text in (token.token, token.reference_token, token.model_token)]
    texts = map(quoted, (token.before[-_MOST_BEFORE:], *tokens))
    return (f"{token.divergence:.3g}", *texts, f"{token.window:,}: {token.position:,}")


def _calibration(record: CalibrationRecord) -> Section:
    """Return which text was read, the tokens per expert and, with rule `gptq`, the held-out errors by layer."""
    columns = ["layer", "tokens per expert: least", "median", "most"]
    if record.gptq:
        columns += ["held-out error after the layer", "with rule mse", "from earlier layers"]
    rows = [_calibrated_layer(number, layer) for number, layer in sorted(record.layers.items())]
    table = Table(columns, rows, words=(), summary=f"Layers ({len(rows)})")
    return Section("Calibration", tuple(_calibration_sentences(record)), (table,))


def _calibrated_layer(number: int, layer: LayerCalibration) -> tuple[str, ...]:
    tokens = layer.tokens or (0,)
    cells = (str(number), f"{min(tokens):,}", f"{median_low(tokens):,}", f"{max(tokens):,}")
    if layer.gptq is None:
        return cells
    if (errors := layer.gptq.held_out) is None:
        return (*cells, "not measured", "", "")
    return (*cells, *(f"{e:.3g}" for e in (errors.gptq_error, errors.mse_error, errors.inherited_error)))


def _calibration_sentences(record: CalibrationRecord) -> Iterator[str]:
    texts = joined([shortened(last_part(name)) for name, _ in record.texts]) or "no text"
    windows = counted(record.windows, "window")
    yield f"Calibrated on {record.tokens:,} tokens of {texts}, in {windows} of up to {record.window:,} tokens."
    if record.dropped_windows:
        yield f"Windows left out because their activations were not finite: {record.dropped_windows:,}."
    if record.exponents_digest is not None:
        yield (
            "Smoothing multiplied channels of the norm before the experts by powers of two, and divided everything "
            "that reads them by the same. This is exact: without quantization, the model computes the same outputs. "
            "It makes the error of FP4 activations smaller."
        )
    if not record.gptq:
        return
    yield (
        "Rule `gptq` quantizes layer by layer. Within a row, later weights compensate for the rounding of "
        "earlier ones; each layer also compensates for the errors of those before it, on the calibration inputs."
    )
    if few := record.num_unfitted:
        total = sum(len(layer.tokens) for layer in record.layers.values())
        sentence = f"{few:,} of {total:,} experts saw fewer than {MIN_TOKENS} tokens: rule mse converted their "
        sentence += "down projections."
        yield f"Warning: {sentence} Use a longer text." if 2 * few > total else sentence
    held_out = list(record.held_out.values())
    if not held_out:
        yield f"The output error: {record.measured_on}."
        return
    better = sum(not errors.is_worse for errors in held_out)
    yield (
        f"The output error is at most that of rule mse after {better:,} of {len(held_out):,} layers, "
        f"{record.measured_on}. It is the mean over tokens of |h - h'|² / |h|², where h are the hidden states of the "
        "INT4 model."
    )
    if record.warning:
        yield f"Warning: {record.warning}"


def _weight_errors(report: Report) -> Section:
    """Return the errors of each role, and the total if there are several roles."""
    totals = shown_totals(report.ledger.totals)
    num_roles = len(totals.keys() - {TOTAL})
    has_proof = report.total.lossless_tensors is not None
    columns = ["role", "weights", "SQNR", "relative MSE", "relative to max", "non-zero weights changed"]
    if has_proof:
        columns.append("lossless")
    rows: list[tuple[str, ...]] = []
    for role, m in totals.items():
        if role == TOTAL and num_roles == 1:
            continue
        to_max = f"{m.achieved_to_max:.3f}" if m.sampled_error_max > 0 else ""
        changed = percent(m.num_nonzero - m.equal_nonzero, m.num_nonzero)
        sqnr = format_decibels(m.sqnr_db)
        row = (role_name(role), f"{m.num_weights:,}", sqnr, exact_zero(m.relative_mse), to_max, changed)
        if has_proof:
            row = (*row, f"{m.lossless_tensors or 0:,} of {counted(m.cast_tensors or 0, 'tensor')}")
        rows.append(row)
    sentence = (
        "Against the exact values of the source. Max is the usual recipe: every block gets its largest weight over 6 "
        "as scale. Its error is measured on a sample of every tensor."
    )
    if (steps := report.total.max_error_steps) is not None:
        sentence += f" The largest error of a weight is {steps:.2f} steps of its INT4 grid."
    return Section("Error of the weights", (sentence,), (Table(columns, rows),))


def _worst_tensors(report: Report) -> Section:
    rows = [
        (
            f"{t.location}: {t.module}" if t.location else t.module,
            format_decibels(t.sqnr_db),
            "" if t.sqnr_max_db is None else format_decibels(t.sqnr_max_db),
            "" if t.max_error_steps is None else f"{t.max_error_steps:.2f}",
            f"{100 * t.changed_share:.1f} %",
        )
        for t in report.worst
    ]
    columns = ("tensor", "SQNR", "max", "largest error, steps", "non-zero weights changed")
    return Section("Worst tensors", (), (Table(columns, rows),))


def _contract(validation: ValidationReport) -> Section:
    """Return the rules of the contract with what breaks them, and what was compared with the source."""
    rules = validation.contract.rules
    offenders = [(str(rule.number), each.name, each.problem) for rule in rules for each in rule.offenders]
    tables = [Table(("rule", "where", "problem"), offenders, words=(1, 2))] if offenders else []
    columns = ("rule", "verdict", "count", "requirement")
    tables.append(Table(columns, [rule.cells for rule in rules], words=(1, 3), summary=f"Rules ({len(rules)})"))
    sentences = [validation.contract.summary]
    if validation.weights is not None:
        sentences += _compared_sentences(validation.weights)
    return Section("Servable contract", sentences, tables)


def _compared_sentences(weights: WeightsReport) -> Iterator[str]:
    certificate = weights.certificate
    if certificate.tensors:
        wrong = len(certificate.mismatches)
        outcome = f"faults in {wrong:,} of them" if wrong else "no fault was found"
        rows = "Every row" if certificate.is_whole else f"{certificate.rows:,} rows"
        yield (
            f"{rows} of {certificate.tensors:,} converted tensors, and {certificate.copies:,} copies, were checked "
            f"against the source by code that shares nothing with the conversion: {outcome}."
        )
    if weights.journal_compared:
        wrong = len(weights.journal_mismatches)
        outcome = f"{wrong:,} differ" if wrong else "all agree"
        yield (
            f"{weights.journal_compared:,} tensors decoded from the written bytes and compared with the journal's "
            f"figures: {outcome}."
        )


def needs_section(report: Report) -> Section | None:
    """Return memory and GPUs; None if they are not known."""
    if (model := report.model) is None:
        return None
    fp8, bf16 = (f"{model.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    states = f" Linear attention: {gigabytes(model.state_bytes)} of states per request." if model.state_bytes else ""
    sentences = (
        f"Weights: {gigabytes(model.num_bytes)}. KV cache: {fp8} bytes per token in FP8, {bf16} in BF16; "
        f"tensor parallelism does not divide it.{states}",
        f"Computed from the headers, with {UTILIZATION:.0%} of each GPU's memory used and {gigabytes(OVERHEAD_BYTES)} "
        f"assumed for activations, CUDA graphs and NCCL ({gigabytes(H200_OVERHEAD_BYTES)} on H200). "
        "`k2convert fit` computes other GPUs, layouts and lengths.",
    )
    rows = [
        (
            f"{fit.layout.num_gpus} x {fit.gpu.title}",
            str(fit.layout),
            gigabytes(fit.weight_bytes),
            f"{fit.tokens_in('fp8'):,}",
            f"{fit.tokens_in('bf16'):,}",
        )
        for fit in fewest_holders(model)
    ]
    columns = ("GPUs", "layout", "weights on each", "KV tokens, FP8", "KV tokens, BF16")
    return Section("Needs", sentences, (Table(columns, rows, words=(0, 1)),) if rows else ())


def provenance(report: Report) -> Section:
    """Return the known facts that identify the result."""
    ledger = report.ledger
    recipe = ledger.recipe
    record = ledger.calibration
    rows = (
        ("report made (UTC)", report.made_on),
        ("source", ledger.source.repo),
        ("source revision", ledger.source.revision),
        ("source headers (blake3)", ledger.fingerprint.get("source_headers")),
        ("source family", ledger.source.family),
        ("recipe", recipe.name),
        ("rule", recipe.rule),
        ("roles", ", ".join(recipe.roles)),
        ("in FP8", ", ".join(recipe.fp8)),
        ("layout", recipe.layout),
        ("activations", recipe.activations),
        ("input scales", f"gate_up {recipe.input_scale.gate_up}, down {recipe.input_scale.down}"),
        ("KV cache", recipe.kv_cache),
        ("quantizer", recipe.quantizer),
        ("arithmetic version", ledger.fingerprint.get("arithmetic")),
        *(() if record is None else ((f"text {name} (blake3)", digest) for name, digest in record.texts)),
        ("seed of the windows", None if record is None else record.seed),
        ("k2convert", ledger.tool_version),
        *ledger.versions.items(),
        ("shards", len(ledger.shards)),
    )
    known = tuple((label, str(value)) for label, value in rows if value not in (None, ""))
    sentence = "`k2convert.json` holds the full recipe, all checksums and the error totals."
    return Section("Provenance", (sentence,), (Table(("fact", "value"), known, words=(0, 1), is_code=True),))
