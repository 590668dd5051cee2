"""What config.json may say of the INT4 weights: nothing, or what the arithmetic here takes them for.

That weights are INT4 is decided by their tensors. But their bytes look the same in other schemes, so a config that
states another one is believed, and the source refused.
"""

from collections.abc import Iterator
from typing import Any

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.choices import GROUP_SIZE
from k2convert.errors import PlanError
from k2convert.models.kimi import text_config

_KNOWN_CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
_KNOWN_GROUP = {"format": "pack-quantized"}
_KNOWN_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP_SIZE}


def check_int4_config(config: dict[str, Any], *, where: str) -> None:
    """Refuse a quantization_config that states another scheme (PlanError); what it leaves out is taken as known."""
    for place, found, expected in _statements(config):
        for field, known in expected.items():
            stated = found.get(field)
            if stated is not None and stated != known:
                raise PlanError(
                    f"{where}: config.json: {place}.{field} is {stated!r}, and this converts {known!r} alone. "
                    "Start from Moonshot's INT4 release, or download config.json again if it is of another model."
                )


def _statements(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(where it stands, what is stated, what is known) of every part that speaks of the weights."""
    holders = {"quantization_config": config}
    if (inner := text_config(config)) is not config:
        holders["text_config.quantization_config"] = inner
    for place, holder in holders.items():
        quantization = mapping_or_empty(holder.get("quantization_config"))
        yield place, quantization, _KNOWN_CONFIG
        for name, group in mapping_or_empty(quantization.get("config_groups")).items():
            weights = mapping_or_empty(mapping_or_empty(group).get("weights"))
            yield f"{place}.config_groups.{name}.weights", weights, _KNOWN_WEIGHTS
            if weights:
                yield f"{place}.config_groups.{name}", mapping_or_empty(group), _KNOWN_GROUP
