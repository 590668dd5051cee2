"""The servable contract: nineteen rules a program checks on a finished NVFP4 checkpoint, without a GPU.

Errors mean that an engine would refuse the folder, or load it and answer wrongly without a word; warnings are counted.
Headers and configs are read first and decide whatever they can; what needs data shares one pass over the shards (see
`scan`). One fault is one rule's finding, as far as faults can be told apart. Nothing here is specific to what wrote the
folder: other people's NVFP4 checkpoints are held to the same rules, but for the ledger.

Left out: running an engine. Behaviour is as read in vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM's sources.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from k2convert.checkpoint.index import open_checkpoint
from k2convert.validate.contract import config as rules_config
from k2convert.validate.contract import data as rules_data
from k2convert.validate.contract import modules as rules_modules
from k2convert.validate.contract import package as rules_package
from k2convert.validate.contract import tensors as rules_tensors
from k2convert.validate.contract.data import TensorError
from k2convert.validate.contract.findings import (
    ContractReport,
    Findings,
    Offender,
    RuleResult,
    Severity,
    Verdict,
    results,
)
from k2convert.validate.contract.scan import Advance, Observe, Passing, ScanResult, scan_shards
from k2convert.validate.contract.subject import Subject, open_subject

__all__ = [
    "Advance",
    "ContractReport",
    "Observe",
    "Offender",
    "Passing",
    "RuleResult",
    "Severity",
    "Subject",
    "TensorError",
    "Verdict",
    "check_contract",
    "check_subject",
    "open_subject",
]

# Rules about tensors as a whole say nothing sensible while a shard cannot be read.
_NEED_ALL_SHARDS: tuple[tuple[int, Callable[[Subject], Findings]], ...] = (
    (1, rules_tensors.check_names),
    (2, rules_tensors.check_prefix),
    (3, rules_tensors.check_shapes),
    (8, rules_tensors.check_totals),
    (9, rules_tensors.check_expert_counts),
    (14, rules_modules.check_exclude_list),
)
_FROM_CONFIGS: tuple[Callable[[Subject], Findings], ...] = (
    rules_tensors.check_alignment,
    rules_config.check_quantization_config,
    rules_config.check_config_unchanged,
    rules_config.check_kv_cache,
    rules_package.check_package,
    rules_package.check_sidecars,
)


def check_contract(
    *,
    checkpoint_folder: Path,
    source_folder: Path | None = None,
    tensor_errors: Mapping[str, TensorError] | None = None,
    budget_sqnr_db: float | None = None,
    observe: Observe | None = None,
    progress: Advance | None = None,
) -> ContractReport:
    """Check all nineteen rules on a folder, against its INT4 source if that is given.

    `tensor_errors` maps module names to their measured error for rule 18; it is read after the pass over the shards,
    so that an `observe` that measures may fill it. `budget_sqnr_db` replaces the budget of the ledger's recipe.
    `progress` is told the bytes dealt with. Raises CheckpointError where a folder is missing or the source is damaged,
    PlanError where the source is no Kimi K2 checkpoint, SourceReadError where the system cannot read.
    """
    source = open_checkpoint(source_folder) if source_folder is not None else None
    return check_subject(
        open_subject(checkpoint_folder, source=source),
        tensor_errors=tensor_errors,
        budget_sqnr_db=budget_sqnr_db,
        observe=observe,
        progress=progress,
    )


def check_subject(
    subject: Subject,
    *,
    tensor_errors: Mapping[str, TensorError] | None = None,
    budget_sqnr_db: float | None = None,
    observe: Observe | None = None,
    progress: Advance | None = None,
    passing: Passing | None = None,
    scan: ScanResult | None = None,
) -> ContractReport:
    """The same for a folder that is open already; see check_contract.

    `passing` is called with all bytes of all shards; `scan` is a pass over the shards made before.
    """
    found = [_check_whole(subject, number, check) for number, check in _NEED_ALL_SHARDS]
    found += [check(subject) for check in _FROM_CONFIGS]
    list_is_good = not any(f.number == 14 and (f.errors or f.skip_reason) for f in found)
    found.append(rules_config.check_hf_quant_config(subject, compare_lists=list_is_good))
    if scan is None:
        scan = scan_shards(subject, observe=observe, advance=progress, passing=passing)
    found += _check_data(subject, scan)
    found.append(rules_data.check_errors(subject, tensor_errors, budget_sqnr_db))
    return ContractReport(
        folder=str(subject.folder),
        layout=subject.layout,
        activations="w4a4" if subject.has_input_scale else "w4a16",
        rules=results(found),
    )


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
    return [*found, rules_package.check_ledger(subject, scan)]
