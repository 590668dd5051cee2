"""The smoothing of a result: exponents derived from its norms, and compared with those that the ledger states.

A result with smoothing has the weight of the norm before a MoE block times 2**a, channel by channel, and the columns
of all that read its output over 2**a: the router, and gate and up of shared and routed experts. Powers of two change no
digit, so every scaled number is the source's times a power of two, or it is wrong. The certificate checks that.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from k2convert.calibration.layer_files import digest_of_exponents
from k2convert.check.contract.result import NO_SCALING, Exponents, Result, Scaling
from k2convert.check.remote import Shards
from k2convert.check.results import Offender
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.names import LEDGER_NAME
from k2convert.checkpoint.reader import Bytes, ShardReader
from k2convert.choices import MAX_COLUMN_EXPONENT
from k2convert.models.names import WEIGHT, Role
from k2convert.quantize.formats.bf16 import bf16_values
from k2convert.records.calibration import CalibrationRecord

_BITS: Final = {"BF16": np.uint16, "F32": np.uint32}


def read_scaling(result: Result, *, shards: Shards) -> Scaling:
    """Derive the exponents of every MoE layer from the norms of result and source.

    Without a source, or if the ledger does not state smoothing, there are none, so every change is an error.
    """
    record = result.calibration_record
    if result.source is None or record is None or record.exponents_digest is None:
        return NO_SCALING
    derived, problems = _derive(result, shards)
    problems = problems or _ledger_problems(result, record, derived)
    return Scaling(derived, problems)


def _norm(result: Result, layer: int) -> str:
    return f"{result.family.mlp_norm.format(layer=layer)}.{WEIGHT}"


def _derive(result: Result, shards: Shards) -> tuple[dict[int, Exponents], dict[int | None, Offender]]:
    derived = dict[int, Exponents]()
    problems = dict[int | None, Offender]()
    source = result.source
    assert source is not None
    norms: dict[int, tuple[TensorInfo, TensorInfo]] = {}  # in source and result; rules 7 and 8 report missing ones
    layers = {parts.layer for parts in result.source_names.values() if parts.role is Role.EXPERTS}
    for layer in sorted(layer for layer in layers if layer is not None):
        name = _norm(result, layer)
        before = source.tensors.get(name)
        after = result.tensors.get(name)
        if before is None or after is None or before.dtype not in _BITS:
            continue
        if (before.dtype, before.shape) == (after.dtype, after.shape):
            norms[layer] = before, after
    of_source, of_result = ([pair[side] for pair in norms.values()] for side in (0, 1))
    with (
        shards.around_tensors(of_result, of_source),
        ShardReader(source.path) as reader,
        ShardReader(lambda shard: result.folder / shard) as written,
    ):
        for layer, (before, after) in norms.items():
            derived[layer], problem = _exponents_between(reader.read(before), written.read(after), dtype=before.dtype)
            if problem:
                problems[layer] = Offender(_norm(result, layer), problem)
    return derived, problems


def _exponents_between(before: Bytes, after: Bytes, *, dtype: str) -> tuple[Exponents, str]:
    """Return the exponents int8 [K] by which the norm weight `after` differs from the source's, and what is wrong.

    Where a channel is not the source's times 2**-4 .. 2**4, its exponent is 0, and the first one is described.
    """
    old = _values(before, dtype)
    new = _values(after, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        fractions, powers = np.frexp(new / old)
    same = before.view(_BITS[dtype]) == after.view(_BITS[dtype])
    is_power = fractions == 0.5
    exponents = np.where(same | ~is_power, 1, powers) - 1
    fits = same | (is_power & (np.abs(exponents) <= MAX_COLUMN_EXPONENT))
    problem = ""
    channel = int(np.argmin(fits))
    if not fits.all():
        reason = "not a power of two times it"
        if is_power[channel]:
            largest = MAX_COLUMN_EXPONENT
            reason = f"2^{exponents[channel]}, but smoothing uses 2^-{largest} to 2^{largest}"
        problem = f"{np.count_nonzero(~fits):,} of {fits.size:,} channels cannot be smoothing: channel {channel} is "
        problem += f"{new[channel]:g}, the source's is {old[channel]:g}: {reason}"
    return np.where(fits, exponents, 0).astype(np.int8), problem


def _values(data: Bytes, dtype: str) -> NDArray[np.float64]:
    if dtype == "BF16":
        return bf16_values(data.view(np.uint16)).astype(np.float64)
    return data.view(np.float32).astype(np.float64)


def _ledger_problems(
    result: Result, record: CalibrationRecord, exponents: Mapping[int, Exponents]
) -> dict[int | None, Offender]:
    """Compare the exponents with the ledger's digest, and its counts, which tell the layer that differs."""
    if digest_of_exponents(exponents) == record.exponents_digest:
        return {}
    problems: dict[int | None, Offender] = {}
    for layer, layer_exponents in exponents.items():
        counts: Counter[int] = Counter(layer_exponents.tolist())
        stated = record.layers.get(layer)
        if stated is None or +Counter(stated.exponents) != counts:
            problem = f"scales channels by {_listed(counts)}, but the ledger states "
            problem += "nothing" if stated is None else _listed(stated.exponents)
            problems[layer] = Offender(_norm(result, layer), problem)
    if problems:
        return problems
    problem = "is not the digest of the powers of two that the norms have"
    return {None: Offender(f"{LEDGER_NAME}: calibration.exponents_digest", problem)}


def _listed(counts: Mapping[int, int]) -> str:
    return ", ".join(f"2^{exponent} ({count:,} channels)" for exponent, count in sorted(counts.items()) if count)
