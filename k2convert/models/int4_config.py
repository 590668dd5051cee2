"""Whether config.json states the INT4 scheme that k2convert converts.

The tensors decide which weights are INT4. Their bytes look the same in other schemes, so a source whose config states
a different scheme is refused. A config that states nothing is accepted.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.layouts import QUANTIZATION_KEYS
from k2convert.choices import GROUP_SIZE
from k2convert.errors import PlanError, quoted, shortened
from k2convert.models.config import text_config
from k2convert.models.names import Family

_KNOWN_CONFIG: Final = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_KNOWN_GROUP: Final = {"format": "pack-quantized"}
_KNOWN_WEIGHTS: Final = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP_SIZE,
}


def check_int4_config(config: Mapping[str, Any], *, family: Family, where: str) -> None:
    """Refuse a quantization_config that states a different scheme (PlanError). Fields it leaves out are accepted."""
    for place, found, expected in _statements(config):
        for field, known in expected.items():
            stated = found.get(field)
            if stated is not None and stated != known:
                raise PlanError(
                    f"{where}: config.json: {place}.{field} is {quoted(stated)}, but only {known!r} can be converted. "
                    f"{family.source_hint}"
                )


def _statements(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (place, stated fields, known fields) for every part that describes the weights."""
    stated = {key: config.get(key) for key in QUANTIZATION_KEYS}
    if (inner := text_config(config)) is not config:
        stated |= {f"text_config.{key}": inner.get(key) for key in QUANTIZATION_KEYS}
    for place, value in stated.items():
        quantization = mapping_or_empty(value)
        yield place, quantization, _KNOWN_CONFIG
        for name, group in mapping_or_empty(quantization.get("config_groups")).items():
            weights = mapping_or_empty(mapping_or_empty(group).get("weights"))
            yield f"{place}.config_groups.{shortened(name)}.weights", weights, _KNOWN_WEIGHTS
            if weights:
                yield f"{place}.config_groups.{shortened(name)}", mapping_or_empty(group), _KNOWN_GROUP
