"""What a result was calibrated with: the part `calibration` of the ledger. A result made without statistics has none.

    {"statistics": DIGEST, "texts": [{"name": .., "blake3": ..}], "tokens": .., "window": .., "windows": ..,
     "dropped_windows": .., "seed": .., "imatrix": true, "smoothing": true, "exponents_digest": DIGEST or null,
     "layers": {"1": {"tokens": [..], "fallback": [..], "exponents": {"-1": 12, "0": 100}}}}

A result of rule `gptq` has `"gptq": true` after `smoothing`, and each layer has what the rule did there:

    "gptq": {"ridge": 0.15, "ridge_gain": 0.4, "shrinkage": 0.5, "down_ridges": [null, 1.5],
                 "down_shrinkages": [null, 0.6], "inherited_error": .., "mse_error": .., "gptq_error": ..,
                 "held_out": {"inherited_error": .., "mse_error": .., "gptq_error": ..}}

It also has `"held_out_windows": 4`, and each layer its `held_out`, unless nothing was kept out of the fit.

If the statistics came from the Hub, "statistics_from" is their address with the commit.

This module is the only one that knows its form.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from k2convert.errors import quoted


@dataclass(frozen=True, slots=True)
class OutputErrors:
    """Errors of the hidden states after a layer: the mean over tokens of |h - h'|^2 / |h|^2, h being the INT4 model's.

    `inherited_error` has the layer's experts unconverted: it comes from earlier layers. `mse_error` has them
    converted by rule `mse`, `gptq_error` as they were written.
    """

    inherited_error: float
    mse_error: float
    gptq_error: float

    @property
    def is_worse(self) -> bool:
        """Whether rule `mse` would have given less error."""
        return self.gptq_error > self.mse_error

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {key: _written(getattr(self, key)) for key in _ERRORS}

    @classmethod
    def from_dict(cls, stated: dict[str, Any]) -> "OutputErrors":
        """Rebuild from `to_dict`; raises ValueError naming a missing or mistyped field."""
        return cls(**{key: _real(stated[key], key) for key in _ERRORS})


@dataclass(frozen=True, slots=True)
class GptqLayer:
    """What rule `gptq` did in one MoE layer, and what it gained.

    `ridge` is the strength of the ridge with which gate and up were corrected for the errors of earlier layers, None
    if no correction gained anything. `ridge_gain`, 0 to 1, is the share of those errors that the correction removed,
    measured on the half of the windows that it was not fitted to. `shrinkage`, 0 to 1, is how far the second moments
    of the input of gate and up were drawn to their diagonal, None if they were rounded without correction.

    `down_ridges` and `down_shrinkages` say the same of the down projection of each routed expert.

    `fitted` are the errors on the tokens that all this was fitted to, which say little. `held_out` are those on the
    windows that were kept out of the fit, None if there were none.
    """

    ridge: float | None
    ridge_gain: float
    shrinkage: float | None
    down_ridges: tuple[float | None, ...]
    down_shrinkages: tuple[float | None, ...]
    fitted: OutputErrors
    held_out: OutputErrors | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "ridge": _written(self.ridge),
            "ridge_gain": _written(self.ridge_gain),
            "shrinkage": _written(self.shrinkage),
            "down_ridges": [_written(ridge) for ridge in self.down_ridges],
            "down_shrinkages": [_written(shrinkage) for shrinkage in self.down_shrinkages],
            **self.fitted.to_dict(),
            **({} if self.held_out is None else {"held_out": self.held_out.to_dict()}),
        }

    @classmethod
    def from_dict(cls, document: Any) -> "GptqLayer":
        """Rebuild from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        has_held_out = "held_out" in _object(document, "gptq")
        stated = _object(document, "gptq", keys=_GPTQ_KEYS | {"held_out"} if has_held_out else _GPTQ_KEYS)
        ridges, shrinkages = _list(stated, "down_ridges"), _list(stated, "down_shrinkages")
        if len(ridges) != len(shrinkages):
            raise ValueError(f"down_shrinkages has {len(shrinkages)} experts, but down_ridges has {len(ridges)}")
        return cls(
            ridge=_or_none(stated["ridge"], "ridge"),
            ridge_gain=_real(stated["ridge_gain"], "ridge_gain", most=1.0),
            shrinkage=_or_none(stated["shrinkage"], "shrinkage", most=1.0),
            down_ridges=tuple(_or_none(ridge, "down_ridges") for ridge in ridges),
            down_shrinkages=tuple(_or_none(value, "down_shrinkages", most=1.0) for value in shrinkages),
            fitted=OutputErrors.from_dict(stated),
            held_out=OutputErrors.from_dict(_object(stated["held_out"], "held_out", keys=frozenset(_ERRORS)))
            if has_held_out
            else None,
        )


@dataclass(frozen=True, slots=True)
class LayerCalibration:
    """What the statistics say of one MoE layer.

    `tokens` are the tokens of each routed expert. `fallback` numbers the experts with too few tokens, whose down
    projection took an importance that is drawn toward an even one. `exponents` maps each exponent of smoothing to
    its number of channels, 0 included; it is empty without smoothing. `gptq` is only there with that rule.
    """

    tokens: tuple[int, ...]
    fallback: tuple[int, ...]
    exponents: dict[int, int]
    gptq: GptqLayer | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "tokens": list(self.tokens),
            "fallback": list(self.fallback),
            "exponents": {str(exponent): count for exponent, count in sorted(self.exponents.items())},
            **({} if self.gptq is None else {"gptq": self.gptq.to_dict()}),
        }


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """What a result was calibrated with.

    `statistics` is the digest of the statistics file, `texts` are the names and digests of its texts. `imatrix`
    and `smoothing` are its uses. `exponents_digest` is None if no channel was scaled. `layers` are
    the MoE layers. `statistics_from` is the file's address with its commit, if it came from the Hub. `gptq`
    says whether the rule was `gptq`; then each layer has its own part of that name, and `held_out_windows` more
    windows were kept out of everything that was fitted.
    """

    statistics: str
    texts: tuple[tuple[str, str], ...]
    tokens: int
    window: int
    windows: int
    dropped_windows: int
    seed: int
    weighted: bool
    smoothing: bool
    exponents_digest: str | None
    layers: dict[int, LayerCalibration]
    gptq: bool = False
    statistics_from: str | None = None
    held_out_windows: int = 0

    @property
    def held_out(self) -> dict[int, OutputErrors]:
        """The errors after each MoE layer on the windows that were kept out of the fit, in order; empty if unknown."""
        found = {number: layer.gptq for number, layer in sorted(self.layers.items())}
        return {n: layer.held_out for n, layer in found.items() if layer is not None and layer.held_out is not None}

    @property
    def measured_on(self) -> str:
        """Which windows `held_out` is of, or why it is empty."""
        if self.held_out:
            total = self.windows + self.held_out_windows
            return f"on {self.held_out_windows:,} of {total:,} windows that were kept out of the fit"
        return "no held-out figure: " + (
            "only one window" if self.windows == 1 else "no window was kept out of the fit"
        )

    @property
    def warning(self) -> str | None:
        """Which layers would have less error by rule `mse`, on the windows that were kept out; None for none."""
        worse = {number: found for number, found in self.held_out.items() if found.is_worse}
        if not worse:
            return None
        layer, found = max(worse.items(), key=lambda item: item[1].gptq_error - item[1].mse_error)
        count = f"{len(worse):,} of {len(self.held_out):,} layers"
        return (
            f"In {count}, the error of the outputs is larger than by rule mse, {self.measured_on}. Layer {layer} "
            f"is the worst, with {found.gptq_error:.3g} instead of {found.mse_error:.3g}. Use more tokens, or "
            "a different text."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "statistics": self.statistics,
            **({} if self.statistics_from is None else {"statistics_from": self.statistics_from}),
            "texts": [{"name": name, "blake3": digest} for name, digest in self.texts],
            **{key: getattr(self, key) for key in _NUMBERS},
            "imatrix": self.weighted,
            "smoothing": self.smoothing,
            **({"gptq": True} if self.gptq else {}),
            **({"held_out_windows": self.held_out_windows} if self.held_out_windows else {}),
            "exponents_digest": self.exponents_digest,
            "layers": {str(number): layer.to_dict() for number, layer in sorted(self.layers.items())},
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "CalibrationRecord":
        """Rebuild a record from `to_dict`; raises ValueError naming a missing, unknown or mistyped field."""
        stated = _object(document, "calibration")
        gptq = "gptq" in stated
        optional = stated.keys() & {"gptq", "held_out_windows", "statistics_from"}
        stated = _object(document, "calibration", keys=_KEYS | optional)
        if gptq and stated["gptq"] is not True:
            raise ValueError(f"gptq is {quoted(stated['gptq'])}")
        digest, layers = stated["exponents_digest"], _object(stated["layers"], "layers")
        if digest is not None and not _flag(stated, "smoothing"):
            raise ValueError("exponents_digest without smoothing")
        return cls(
            statistics=_text(stated, "statistics"),
            texts=tuple(_named_text(text) for text in _list(stated, "texts")),
            **{key: _count(stated[key], key) for key in _NUMBERS},
            weighted=_flag(stated, "imatrix"),
            smoothing=_flag(stated, "smoothing"),
            exponents_digest=None if digest is None else _text(stated, "exponents_digest"),
            layers={_number(number, "layers"): _layer(layer, gptq=gptq) for number, layer in layers.items()},
            gptq=gptq,
            statistics_from=_text(stated, "statistics_from") if "statistics_from" in optional else None,
            held_out_windows=_count(stated.get("held_out_windows", 0), "held_out_windows"),
        )


_NUMBERS = ("tokens", "window", "windows", "dropped_windows", "seed")
_KEYS = frozenset({"statistics", "texts", *_NUMBERS, "imatrix", "smoothing", "exponents_digest", "layers"})
_ERRORS = ("inherited_error", "mse_error", "gptq_error")
_GPTQ_KEYS = frozenset({"ridge", "ridge_gain", "shrinkage", "down_ridges", "down_shrinkages", *_ERRORS})


def _layer(document: Any, *, gptq: bool) -> LayerCalibration:
    keys = {"tokens", "fallback", "exponents", *(["gptq"] if gptq else [])}
    stated = _object(document, "layers", keys=frozenset(keys))
    tokens, exponents = _list(stated, "tokens"), _object(stated["exponents"], "exponents")
    found = GptqLayer.from_dict(stated["gptq"]) if gptq else None
    if found is not None and len(found.down_ridges) != len(tokens):
        raise ValueError(f"gptq: {len(found.down_ridges)} experts, but tokens has {len(tokens)}")
    return LayerCalibration(
        tokens=tuple(_count(count, "tokens") for count in tokens),
        fallback=tuple(_count(expert, "fallback") for expert in _list(stated, "fallback")),
        exponents={_number(exponent, "exponents"): _count(n, "exponents") for exponent, n in exponents.items()},
        gptq=found,
    )


def _named_text(document: Any) -> tuple[str, str]:
    stated = _object(document, "texts", keys=frozenset({"name", "blake3"}))
    return _text(stated, "name"), _text(stated, "blake3")


def _object(document: Any, name: str, *, keys: frozenset[str] | None = None) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise ValueError(f"{name} is not an object")
    stated = cast(dict[str, Any], document)
    if keys is not None and stated.keys() != keys:
        raise ValueError(f"{name}: {quoted(sorted(stated.keys() ^ keys))} missing or unknown")
    return stated


def _list(stated: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(stated[name], list):
        raise ValueError(f"{name} is not a list")
    return cast(list[Any], stated[name])


def _text(stated: dict[str, Any], name: str) -> str:
    if not isinstance(stated[name], str):
        raise ValueError(f"{name} is {quoted(stated[name])}")
    return stated[name]


def _flag(stated: dict[str, Any], name: str) -> bool:
    if not isinstance(stated[name], bool):
        raise ValueError(f"{name} is {quoted(stated[name])}")
    return stated[name]


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {quoted(value)} is not a count")
    return value


def _real(value: Any, name: str, *, most: float = math.inf) -> float:
    """Return a finite number from 0 to `most`."""
    if type(value) not in (int, float) or not (math.isfinite(value) and 0 <= value <= most):
        limits = "a finite number, 0 or more" if most == math.inf else f"a number from 0 to {most:g}"
        raise ValueError(f"{name}: {quoted(value)} is not {limits}")
    return float(value)


def _or_none(value: Any, name: str, *, most: float = math.inf) -> float | None:
    return None if value is None else _real(value, name, most=most)


def _written(value: float | None) -> float | None:
    """Return a number as Python's float, which JSON writes so that it reads back as itself."""
    return None if value is None else float(value)


def _number(text: str, name: str) -> int:
    """Return the number that a key means; only the spelling that `to_dict` writes."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) < 7 and text == str(int(text))):
        raise ValueError(f"{name}: {quoted(text)} is not a number")
    return int(text)
