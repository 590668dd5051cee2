"""The servable contract: nineteen rules that a finished NVFP4 checkpoint must keep. They are checked without a GPU.

An error means that an engine refuses the folder, or loads it and gives wrong answers without a message. A warning is
counted. Headers and configs are read first. Rules that need data share one pass over the shards (see `scan`). One
fault is reported by one rule if faults can be told apart. NVFP4 checkpoints made by other tools are checked by the
same rules, except for the ledger.

Left out: running an engine. Engine behavior is as read in vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM's sources.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from k2convert.validate.contract import config as rules_config
from k2convert.validate.contract import data as rules_data
from k2convert.validate.contract import modules as rules_modules
from k2convert.validate.contract import package as rules_package
from k2convert.validate.contract import tensors as rules_tensors
from k2convert.validate.contract.data import TensorError
from k2convert.validate.contract.findings import ContractReport, Findings, results
from k2convert.validate.contract.result import Subject
from k2convert.validate.contract.scan import ScanResult
from k2convert.validate.totals import Figures

__all__ = ["check_subject"]

# These rules need every header. They are skipped if a shard cannot be read.
_NEED_ALL_SHARDS: tuple[tuple[int, Callable[[Subject], Findings]], ...] = (
    (1, rules_tensors.check_names),
    (2, rules_tensors.check_prefix),
    (3, rules_tensors.check_shapes),
    (8, rules_tensors.check_totals),
    (9, rules_tensors.check_expert_counts),
    (14, rules_modules.check_exclude_list),
)
_FOR_NVFP4: Final = frozenset({3, 4, 5, 6, 11, 13, 14, 15, 18})
"""The rules that say nothing of a result with the source's own weights."""
_FROM_CONFIGS: tuple[Callable[[Subject], Findings], ...] = (
    rules_tensors.check_alignment,
    rules_config.check_quantization_config,
    rules_config.check_config_unchanged,
    rules_config.check_kv_cache,
    rules_package.check_package,
    rules_package.check_sidecars,
)


def check_subject(
    subject: Subject,
    scan: ScanResult,
    *,
    errors: Mapping[str, TensorError] | None = None,
    totals: Mapping[str, Figures] | None = None,
) -> ContractReport:
    """Check all nineteen rules on a folder that was opened and scanned.

    `errors` maps modules to their measured errors, for rule 18. The rule is skipped if they are None. `totals` are the
    measured figures by role, for rule 19; None if not every converted weight was measured. If the subject is a part,
    headers and configs of the whole are checked, and the rules on data say which part they looked at.
    """
    whole = subject.whole or subject
    found = [_check_whole(whole, number, check) for number, check in _NEED_ALL_SHARDS]
    found += [check(whole) for check in _FROM_CONFIGS]
    list_is_good = not any(f.number == 14 and (f.errors or f.skip_reason) for f in found)
    found.append(rules_config.check_hf_quant_config(whole, compare_lists=list_is_good))
    on_data = [
        *_check_data(subject, scan),
        rules_data.check_errors(subject, errors),
        _check_ledger(subject, scan, totals),
    ]
    if subject.whole is not None:
        for findings in on_data:
            findings.skip(subject.limits)
    found += on_data
    if subject.is_int4:
        found = [_skipped(f.number) if f.number in _FOR_NVFP4 else f for f in found]
    return ContractReport(
        folder=str(subject.folder),
        layout="int4" if subject.is_int4 else subject.layout,
        activations="w4a4" if subject.has_input_scale and not subject.is_int4 else "w4a16",
        rules=results(found),
    )


def _skipped(number: int) -> Findings:
    found = Findings(number)
    found.skip("the weights are the source's INT4")
    return found


def _check_whole(subject: Subject, number: int, check: Callable[[Subject], Findings]) -> Findings:
    if not subject.incomplete:
        return check(subject)
    found = Findings(number)
    found.skip(subject.incomplete)
    return found


def _check_data(subject: Subject, scan: ScanResult) -> list[Findings]:
    found = [
        rules_data.check_block_scales(scan),
        rules_data.check_subnormal_scales(scan),
        rules_data.check_scalars(subject, scan),
        rules_data.check_copies(subject, scan),
    ]
    for findings in found:
        if subject.incomplete:
            findings.skip(subject.incomplete)
    return found


def _check_ledger(subject: Subject, scan: ScanResult, totals: Mapping[str, Figures] | None) -> Findings:
    """Rule 19. Of a part, the hashes of the shards are not known, so only their sizes are compared."""
    whole = subject.whole
    if whole is None:
        return rules_package.check_ledger(subject, scan, totals)
    stated = {} if whole.ledger is None else whole.ledger.shards
    digests = {shard: stated[shard].blake3 for shard in whole.headers if shard in stated}
    return rules_package.check_ledger(whole, replace(scan, digests=digests), None)
