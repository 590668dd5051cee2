"""The families of checkpoints that k2convert converts, and the questions that depend on the family.

    names            roles, tensor names taken apart, what describes a family; the tensors that smoothing changes
    config           config.json of DeepSeek-V3-like models, and whether it states the scheme that is converted
    source_formats   how sources store the weights to convert
    kimi, kimi_k3    the families
    projections      the linear layers to convert, and their bytes as arrays

A family is one file and its rows in FAMILIES, a source format its arithmetic and a row in SOURCE_FORMATS. Nothing
outside this subpackage asks which family a checkpoint has.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts.modelopt import FP8_BLOCKS
from k2convert.choices import FP8_BLOCK
from k2convert.errors import PlanError, quoted, shortened
from k2convert.models import kimi, kimi_k3
from k2convert.models.config import evaluate_shape, find_quantization_config
from k2convert.models.names import Architecture, Family, ModulePlace, TensorName, why_foreign

FAMILIES: tuple[Family, ...] = (kimi_k3.K3, kimi.K2_5, kimi.K2_THINKING)
"""Every family; `family_of` says which one a checkpoint belongs to."""

REFUSED_MODELS: Final = {"deepseek_v4": "DeepSeek-V4", "gpt_oss": "gpt-oss", "kimi_linear": "Kimi-Linear"}
"""Models that have 4-bit experts or similar names too, by their model_type."""

_CUT: Final = (
    "num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim)",
    "num_attention_heads * (qk_nope_head_dim + v_head_dim)",
    "num_attention_heads * v_head_dim",
    "linear_attn_config.num_heads * linear_attn_config.head_dim",
)
"""Sizes of linear layers of attention that tensor parallelism cuts, and that engines do not pad to whole FP8 blocks."""


def find_family(name: str) -> Family:
    """Return the family of this name; raises PlanError listing the known names."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise PlanError(f"unknown family {quoted(name)}; known: {', '.join(sorted(f.name for f in FAMILIES))}")


def family_of(config: Mapping[str, Any] | None, names: Iterable[str]) -> Family:
    """Return the family that a checkpoint belongs to, or a damaged one most likely does, by config and tensor names.

    What decides, as far as it tells families apart: the modules of experts, model_type, the prefix of experts, of
    layers, of anything.
    """
    known = list(names)
    stated = (config or {}).get("model_type")

    def states(family: Family, _: Iterable[str]) -> bool:
        return stated in family.model_types

    candidates = FAMILIES
    for is_like in (_has_modules, states, _has_experts, _has_layers, _resembles):
        candidates = tuple(family for family in candidates if is_like(family, known)) or candidates
    return candidates[-1]


def detect_family(checkpoint: Checkpoint) -> Family:
    """Return the family of a checkpoint that is one of its models; raises PlanError, since others share the names."""
    names = checkpoint.tensors
    for old, new in {rename for family in FAMILIES for rename in family.naming.renamed_prefixes}:
        if any(name.startswith(old) for name in names):
            raise PlanError(
                f"{checkpoint.folder}: tensors are named {old}*, an early naming. Engines rename them to {new}* while "
                f"loading, but only the published names are converted. {_hints()}"
            )
    stated = checkpoint.config.get("model_type")
    for family in FAMILIES:
        for (model_type, key), why in family.refused_configs.items():
            if stated == model_type and key in checkpoint.config:
                raise PlanError(f"{checkpoint.folder}: {why}. {family.source_hint}")
    if (title := REFUSED_MODELS.get(str(stated))) is not None:
        raise PlanError(f"{checkpoint.folder}: this is {title}, which is not converted. {_hints()}")
    family = family_of(checkpoint.config, names)
    named = next((other for other in (family, *FAMILIES) if _has_layers(other, names)), None)
    if named is family and (stated in family.model_types or not family.model_types):
        return family
    if named is not None:
        raise _other_model_type(checkpoint, named)
    prefixes = dict.fromkeys(f"{_layers_prefix(family)}*" for family in reversed(FAMILIES))
    expected = " or ".join(prefixes)
    titles = " or ".join(dict.fromkeys(family.title for family in reversed(FAMILIES)))
    first = next(iter(names), "")
    if why := why_foreign(first):
        raise PlanError(f"{checkpoint.folder}: tensor {first} {why}")
    other = f" Found: {shortened(first)}." if first else ""
    raise PlanError(f"{checkpoint.folder}: no tensor is named {expected}: not a {titles} checkpoint.{other} {_hints()}")


def _hints() -> str:
    return " ".join(dict.fromkeys(family.source_hint for family in reversed(FAMILIES)))


def check_calibrated(checkpoint: Checkpoint) -> None:
    """Refuse a model that is not calibrated on a text (PlanError)."""
    family = detect_family(checkpoint)
    if family.not_calibrated:
        raise PlanError(
            f"{checkpoint.folder}: {family.title} is not calibrated on a text: {family.not_calibrated}. Convert it "
            "without --calibrate and --rule; `evaluate` measures what 4-bit activations cost."
        )


def read_architecture(checkpoint: Checkpoint) -> Architecture:
    """Return the sizes of a checkpoint's model; raises PlanError."""
    return detect_family(checkpoint).read_architecture(checkpoint.config, str(checkpoint.folder))


def _other_model_type(checkpoint: Checkpoint, family: Family) -> PlanError:
    stated = checkpoint.config.get("model_type")
    problem = "is missing" if stated is None else f"is {quoted(stated)}"
    return PlanError(
        f"{checkpoint.folder}: config.json: model_type {problem}, but the tensors have the names of {family.name}, "
        f"whose model_type is {' or '.join(family.model_types)}. Use the model's own config.json. {family.source_hint}"
    )


def _has_modules(family: Family, names: Iterable[str]) -> bool:
    """Return whether experts have the family's modules, whatever their prefix."""
    modules = f"{family.experts.partition('{layer}')[2]}."
    return any(modules in name for name in names)


def _has_experts(family: Family, names: Iterable[str]) -> bool:
    prefix, _, rest = family.experts.partition("{layer}")
    return any(name.startswith(prefix) and f"{rest}." in name for name in names)


def _layers_prefix(family: Family) -> str:
    return family.layer.partition("{layer}")[0]


def _has_layers(family: Family, names: Iterable[str]) -> bool:
    prefix = _layers_prefix(family)
    return any(name.startswith(prefix) for name in names)


def _resembles(family: Family, names: list[str]) -> bool:
    head = family.naming.wrapper or family.prefix
    return any(name.startswith(head) for name in names)


def parse_tensor_name(name: str, *, family: Family) -> TensorName:
    """Take a tensor name apart; raises PlanError if no model of the family has such a tensor."""
    module, _, parameter = name.rpartition(".")
    module_place = family.classify(module)
    if module_place is None:
        if why := why_foreign(name):
            raise PlanError(f"tensor {name}: {why}")
        raise PlanError(
            f"tensor {name}: not part of any known {family.title} model (prefix {family.prefix}). Unknown tensor names "
            f"are never guessed. {family.source_hint} Or add the names to k2convert/models."
        )
    return _named(module, parameter, module_place)


def _named(module: str, parameter: str, module_place: ModulePlace) -> TensorName:
    own = module_place.role, module_place.layer, module_place.expert, module_place.projection
    # Interned: the tensors of a module have one string for its name.
    return TensorName(*own, module=sys.intern(module), parameter=sys.intern(parameter))


@dataclass(frozen=True, slots=True, eq=False)
class TensorNames(Mapping[str, TensorName]):
    """Those of the `names` that a family has, taken apart when they are asked for: K3's million would take 150 MB.

    `place_of` is the family's `classify`, or what knows its answers.
    """

    names: Mapping[str, object]
    place_of: Callable[[str], ModulePlace | None]

    def __getitem__(self, name: str) -> TensorName:
        module, _, parameter = name.rpartition(".")
        module_place = self.place_of(sys.intern(module))
        if module_place is None or name not in self.names:
            raise KeyError(name)
        return _named(module, parameter, module_place)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if self.place_of(sys.intern(name.rpartition(".")[0])) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def parse_tensor_names(checkpoint: Checkpoint, *, family: Family) -> dict[str, TensorName]:
    """Take every tensor name of a checkpoint apart; raises PlanError naming shard and tensor."""
    names: dict[str, TensorName] = {}
    for name, tensor in checkpoint.tensors.items():
        try:
            names[name] = parse_tensor_name(name, family=family)
        except PlanError as error:
            raise PlanError(f"{tensor.shard}: {error}") from None
    return names


def locate_module(module: str) -> ModulePlace | None:
    """Return the place of a module in any known model; None if no family has it."""
    for family in reversed(FAMILIES):
        if (module_place := family.classify(module)) is not None:
            return module_place
    return None


def vocabulary_size(checkpoint: Checkpoint) -> int:
    """Return how many tokens the embedding has; raises PlanError if there is none."""
    name = f"{detect_family(checkpoint).prefix}embed_tokens.weight"
    if name not in checkpoint.tensors:
        raise PlanError(f"{checkpoint.folder}: has no {name}, so no text can be read. Use the whole checkpoint.")
    return checkpoint.tensors[name].shape[0]


def fp8_sizes(config: Mapping[str, Any], *, becomes_fp8: bool) -> tuple[int, ...]:
    """Return the sizes of attention's weights that tensor parallelism cuts, if they are FP8 in blocks, or become it."""
    _, quantization = find_quantization_config(config) or ("", {})
    stated = mapping_or_empty(quantization.get("quantized_layers")).values()
    if not becomes_fp8 and all(mapping_or_empty(layer).get("quant_algo") != FP8_BLOCKS for layer in stated):
        return ()
    with suppress(PlanError):  # a field is no number: other messages say so
        return tuple(size for sizes in _CUT for size in evaluate_shape(sizes, config, "") or ())
    return ()


def cuts_no_block(sizes: Iterable[int], num_gpus: int) -> bool:
    """Return whether tensor parallelism over so many GPUs leaves the FP8 blocks of these sizes whole."""
    return num_gpus == 1 or all(size % (FP8_BLOCK * num_gpus) == 0 for size in sizes)
