"""Rules 4, 5, 6, 7 and 18: checks on tensor data."""

import math
import struct
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from k2convert.models.names import Role
from k2convert.validate.contract.findings import Findings
from k2convert.validate.contract.result import Module, Subject
from k2convert.validate.contract.scan import ScanResult
from k2convert.validate.contract.source_view import NO_SOURCE


class TensorError(Protocol):
    """The error of one converted tensor against its source: SQNR in dB, None if the tensor is all zeros."""

    @property
    def sqnr_db(self) -> float | None: ...


def check_block_scales(scan: ScanResult) -> Findings:
    """Rule 4: 0x7F and 0xFF are NaN, engines do not read the sign, and blocks of scale zero hold only zero codes."""
    found = Findings(4)
    for name, count in scan.invalid_scales.items():
        found.error(name, f"{count:,} block scales are NaN or negative", count=count)
    for name, count in scan.zero_blocks_with_codes.items():
        found.error(name, f"{count:,} blocks have scale zero but non-zero codes", count=count)
    return found


def check_subnormal_scales(scan: ScanResult) -> Findings:
    """Rule 5, a warning: the Marlin kernels on Hopper flush these block scales (bytes 0x01-0x07) to zero."""
    found = Findings(5)
    for name, count in scan.subnormal_scales.items():
        found.warn(name, f"{count:,} block scales below 2^-6", count=count)
    return found


def check_scalars(subject: Subject, scan: ScanResult) -> Findings:
    """Rule 6. Engines use gate's global scale for both or the larger of the two: unequal scales give wrong weights.

    Input scales must be those of the ledger's recipe. Without a recipe, input scales that vary within a layer are a
    warning: most kernels use the layer's maximum for all.
    """
    found = Findings(6)
    shared: dict[tuple[str, str], dict[str, bytes]] = defaultdict(dict)
    by_layer: dict[str, dict[bytes, str]] = defaultdict(dict)
    for name, raw in scan.scalars.items():
        module_name, _, parameter = name.rpartition(".")
        value = struct.unpack("<f", raw)[0]
        module, wanted = subject.modules[module_name], None
        if parameter == subject.names.input_scale:
            wanted = _recipe_input_scale(subject, module)
        if not math.isfinite(value) or value <= 0:
            found.error(name, f"{value!r}, expected finite and positive")
        elif wanted is not None and raw != wanted:
            found.error(name, f"{value!r}, but the recipe's input scale is {struct.unpack('<f', wanted)[0]!r}")
        if wanted is not None:
            continue  # a scale that is the recipe's is shared
        shared[module.parts.sharing_key, parameter][name] = raw
        if parameter == subject.names.input_scale and module.parts.role is Role.EXPERTS:
            kind = "down" if module.parts.projection == "down" else "gate and up"
            by_layer[f"layer {module.parts.layer} {kind}"].setdefault(raw, name)
    for members in shared.values():
        if len(set(members.values())) > 1:
            stated = " and ".join(f"{struct.unpack('<f', raw)[0]!r}" for raw in members.values())
            found.error(next(iter(members)), f"gate and up differ: {stated}")
    for where, values in by_layer.items():
        if len(values) > 1 and not found.errors:
            found.warn(where, f"{len(values)} different input scales, but kernels use one per layer")
    return found


def _recipe_input_scale(subject: Subject, module: Module) -> bytes | None:
    """Return the recipe's input scale of a module as the layout stores it; None if there is no recipe."""
    if subject.recipe is None:
        return None
    scales = subject.recipe.input_scale
    return subject.names.encode_scalar(scales.down if module.parts.projection == "down" else scales.gate_up)


def check_copies(subject: Subject, scan: ScanResult) -> Findings:
    """Rule 7: dtype, shape and bytes of everything that was not converted. Missing tensors are reported by rule 8.

    Smoothing, if the ledger states it, multiplies columns by powers of two. Every other change is an error.
    """
    found = Findings(7)
    scaling = subject.scaling
    if subject.is_pruned:
        every = "every tensor" if subject.is_int4 else "every other tensor"
        found.title = f"{every} is byte-identical to the source, routers to its rows of the kept experts"
    calibration = None if subject.ledger is None else subject.ledger.calibration
    if calibration is not None and calibration.exponents_digest is not None:
        found.title = "every other tensor is the source's, byte for byte or scaled exactly by the norm's powers of two"
    if subject.source is None:
        found.skip(subject.no_source)
        return found
    compared = 0
    for problem in scaling.problems:
        found.error(problem.name, problem.problem)
    reported = {problem.name for problem in scaling.problems}
    for name, tensor in subject.tensors.items():
        before = subject.source.tensors.get(name)
        module = subject.modules.get(name.rpartition(".")[0])
        if before is None or (module is not None and module.is_converted):
            continue
        compared += 1
        if name in reported:
            continue
        if (before.dtype, before.shape) != (tensor.dtype, tensor.shape):
            was = f"{before.dtype} {list(before.shape)}"
            found.error(name, f"{tensor.dtype} {list(tensor.shape)}, was {was}")
        elif name in scan.different:
            found.error(name, f"{scan.different[name]:,} of {tensor.num_bytes:,} bytes differ")
        elif name in scan.misscaled:
            found.error(name, scan.misscaled[name])
        elif name not in scan.compared:
            found.error(name, "was not compared")
    scaled = f", {len(scan.scaled):,} of them scaled" if scan.scaled else ""
    found.note = f"{compared:,} tensors compared{scaled}"
    return found


def check_errors(subject: Subject, errors: Mapping[str, TensorError] | None) -> Findings:
    """Rule 18: every converted tensor was measured, and its SQNR is at least the recipe's budget."""
    found = Findings(18)
    if errors is None:
        found.skip(subject.no_source or NO_SOURCE)
        return found
    if not errors and not subject.converted:
        found.skip("no weight is converted")
        return found
    budget = subject.budget.tensor_sqnr_db
    worst = math.inf
    for module in subject.converted:
        measured = errors.get(module.name)
        if measured is None:
            # Rule 1 or 3 reports a projection that cannot be decoded, rule 1 or 9 one that the source does not have.
            if set(subject.expected_parameters) <= set(module.parameters) and subject.is_in_source(module):
                found.error(module.name, "not measured")
            continue
        sqnr = measured.sqnr_db
        if sqnr is None:
            continue  # an all-zero tensor has no SQNR
        worst = min(worst, sqnr)
        if not sqnr >= budget:
            found.error(module.name, f"SQNR {sqnr:.2f} dB is below the budget of {budget:.2f} dB")
    found.note = f"worst {worst:.2f} dB, budget {budget:.2f} dB" if math.isfinite(worst) else f"budget {budget:.2f} dB"
    return found
