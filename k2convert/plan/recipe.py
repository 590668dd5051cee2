"""Recipes: what to convert and how, as data. YAML in, a frozen and complete object out.

A recipe names roles, never regular expressions. Unknown keys are refused: a misspelled key would otherwise change the
result without a message.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from k2convert.checkpoint.files import DuplicateKeyError, read_small_file
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.choices import MAX_SEED, Activations, Fp8Role, KvCache, Layout, QuantizerKind, RoleName, Rule, Target
from k2convert.errors import ArgumentError, MalformedFileError, PlanError, RecipeError, cut, quoted, shortened
from k2convert.models import find_family
from k2convert.quantize.rules import RULES


def _is_fp32_scale(value: float) -> float:
    if not 2.0**-126 <= value <= 2.0**126:
        raise ValueError("must be between 1.2e-38 and 8.5e+37, because it or its reciprocal is stored in FP32")
    return value


def _is_family(value: str) -> str:
    try:
        return find_family(value).name
    except PlanError as error:
        raise ValueError(str(error)) from None


def _are_unique(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) != len(value):
        raise ValueError("a role is repeated; remove one")
    return value


def _are_roles(value: tuple[RoleName, ...]) -> tuple[RoleName, ...]:
    if "experts" not in value:
        raise ValueError("must contain 'experts', because the source's 4-bit weights are the routed experts")
    return value


Fp32Scale = Annotated[float, AfterValidator(_is_fp32_scale)]

MAX_RECIPE_BYTES: Final = 1 << 20
MAX_PROBLEMS: Final = 5  # of one recipe, in one message


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class InputScale(_Part):
    """Constant activation scales: activation amax / 2688, one for gate and up, one for down."""

    gate_up: Fp32Scale = 1.0
    down: Fp32Scale = 1.0


class Budget(_Part):
    """The least SQNR in dB that `validate` accepts: of a converted tensor, a reference layer, one expert of it."""

    tensor_sqnr_db: float = 17.0
    layer_sqnr_db: float = 15.0
    expert_sqnr_db: float = 12.0


class TextUse(_Part):
    """Use of the text of `run --calibrate`: tokens (by default what experts need), windows, seed."""

    tokens: Annotated[int, Field(ge=1)] | None = None
    window: Annotated[int, Field(ge=1)] = 2048
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0


class Recipe(_Part):
    """One kind of result: which roles become NVFP4, by which rule and in which layout."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    purpose: str = ""  # whom the recipe serves, one sentence; the result does not depend on it
    family: Annotated[str, AfterValidator(_is_family)] | None = None
    target: Target = "nvfp4"
    layout: Layout = "modelopt"
    rule: Rule = "mse"
    quantizer: QuantizerKind = "native"
    activations: Activations = "w4a4"
    smoothing: bool | None = None
    roles: Annotated[tuple[RoleName, ...], AfterValidator(_are_unique), AfterValidator(_are_roles)] = ("experts",)
    fp8: Annotated[tuple[Fp8Role, ...], AfterValidator(_are_unique)] = ()
    input_scale: InputScale = InputScale()
    kv_cache: KvCache | None = None
    budget: Budget = Budget()
    calibration: TextUse = TextUse()

    def least_sqnr_db(self, role: str) -> float:
        """Return the budget of a converted tensor of this role."""
        if role in self.fp8:
            return FP8_SQNR_DB
        return self.budget.tensor_sqnr_db

    def document(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data, with every default; `smoothing` and `fp8` only if they are set.

        Without the purpose, and without the text, which the ledger has itself.
        """
        document = self.model_dump(mode="json", exclude={"purpose", "calibration"})
        if self.smoothing is None:
            del document["smoothing"]
        if not self.fp8:
            del document["fp8"]
        return document


GPTQ_TENSOR_SQNR_DB: Final = 13.0
"""The budget of a tensor by rule gptq, which keeps outputs, not weights: the worst tensor of k2-tiny had 17.2 dB and
that of SmolLM2 18.2 dB, against 22.5 dB by rule mse on k2-tiny."""

FP8_SQNR_DB: Final = 28.0
"""The budget of an FP8 tensor, by any rule: weights of attention have 31.5 dB."""

OTHERS_FP8_SQNR_DB: Final = 25.0
"""The same for another tool's, which may calibrate."""

_NVFP4_KEYS: Final = frozenset(("rule", "layout", "activations", "quantizer", "smoothing", "kv_cache"))


def resolve_recipe(recipe: Recipe, *, has_text: bool = False, to_hub: bool = False) -> Recipe:
    """Return the recipe with its rule, smoothing and budget decided; raises RecipeError if something contradicts it."""
    changes: dict[str, Any] = {}
    if "rule" not in recipe.model_fields_set and recipe.target == "nvfp4":
        if recipe.quantizer == "reference":
            changes["rule"] = "max"
        elif has_text:
            changes["rule"] = "gptq"
    if has_text and "budget" not in recipe.model_fields_set:
        changes["budget"] = Budget(tensor_sqnr_db=GPTQ_TENSOR_SQNR_DB)
    if has_text and recipe.smoothing is None:
        changes["smoothing"] = recipe.activations == "w4a4"  # weights alone lose 10 % by it on SmolLM2
    elif not has_text and not recipe.smoothing:
        changes["smoothing"] = None
    recipe = recipe.model_copy(update=changes)
    for is_wrong, problem in _contradictions(recipe, text=has_text, to_hub=to_hub):
        if is_wrong:
            raise RecipeError(f"recipe {recipe.name}: {problem}")
    return recipe


def _contradictions(r: Recipe, *, text: bool, to_hub: bool) -> Iterator[tuple[object, str]]:
    """Everything that does not fit together, each with its remedy. The first one that holds is reported."""
    rule = RULES[r.rule]
    is_nvfp4 = r.target == "nvfp4"
    unused = [key for key in sorted(r.model_fields_set & _NVFP4_KEYS) if getattr(r, key) is not None]
    both = [role for role in r.fp8 if role in r.roles]
    yield both, f"{', '.join(both)} is in roles and in fp8. Remove it from one of the two."
    yield not is_nvfp4 and r.fp8, f"target {r.target} converts nothing to FP8. Leave out fp8."
    yield not is_nvfp4 and text, f"target {r.target} cannot be calibrated. Leave out --calibrate."
    yield not is_nvfp4 and unused, f"target {r.target} converts nothing to NVFP4. Leave out {', '.join(unused)}."
    yield r.quantizer == "reference" and text, "quantizer reference cannot be calibrated. Leave out --calibrate."
    yield (
        r.quantizer == "reference" and not rule.is_modelopt,
        f"quantizer reference does not support rule {r.rule}. Use rule max.",
    )
    yield (
        text and not rule.needs_text,
        f"--calibrate converts by rule gptq, not {r.rule}. Leave out the rule, or --calibrate.",
    )
    yield is_nvfp4 and rule.needs_text and not text, f"rule {r.rule} needs a text. Add --calibrate FILE."
    yield r.smoothing and not text, "smoothing is part of rule gptq, which needs a text. Add --calibrate FILE."
    yield (
        r.kv_cache and not LAYOUTS[r.layout].vllm_reads_kv_cache,
        f"kv_cache {r.kv_cache} has no effect in vLLM with the layout {r.layout}. Leave it out, and serve with "
        f"`vllm serve --kv-cache-dtype {r.kv_cache}`.",
    )
    yield (
        "calibration" in r.model_fields_set and not text,
        "the keys of calibration are for a text. Add --calibrate FILE, or leave them out.",
    )
    yield to_hub and not is_nvfp4, f"target {r.target} needs a folder as destination: the Hub gets only NVFP4."


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    if installed.is_dir():
        return installed
    return package.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with k2convert."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


class _Loader(yaml.SafeLoader):
    """YAML without a key twice in a mapping, of which YAML itself would take the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set[str]()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise DuplicateKeyError(f"duplicate key {quoted(str(key.value))}")
            keys.add(str(key.value))
        return super().construct_mapping(node, deep=deep)


def load_recipe(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe by shipped name or by path. `overrides` replace its keys, or keys of its sections."""
    path = _find_recipe(name_or_path)
    try:
        text = read_small_file(path, limit=MAX_RECIPE_BYTES).decode("utf-8")
        document: Any = _Loader(text).get_single_data()
    except MalformedFileError as error:
        raise RecipeError(f"{error} Start from a shipped recipe.") from None
    except DuplicateKeyError as error:
        raise RecipeError(f"{path}: {error}. Remove one.") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # values too: a date, a number of digits
        raise RecipeError(f"{path}: not YAML ({cut(str(error))}). Start from a shipped recipe.") from None
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: a recipe must be a mapping of keys to values. Start from a shipped one.")
    return build_recipe(cast(dict[str, Any], document), where=str(path), overrides=overrides)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the overrides in `key=value` and `section.key=value`, with values in YAML; raises RecipeError."""
    overrides: dict[str, Any] = {}
    for text in settings:
        name, equals, raw = text.partition("=")
        if not equals or "" in name.split(".", 1):
            raise RecipeError(f"--set {shortened(text)}: not a setting. Use key=value or section.key=value.")
        try:
            overrides[name] = yaml.safe_load(raw)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError):
            raise RecipeError(f"--set {shortened(text)}: the value is not YAML. Use for example {name}=1.") from None
    return overrides


def _nested(settings: object) -> dict[str, Any]:
    """Return settings with the keys `section.key` in their sections, and paths as text; raises RecipeError."""
    if not isinstance(settings, Mapping):
        raise RecipeError(f'settings {quoted(settings)}: expected keys with their values, like {{"rule": "max"}}.')
    nested: dict[str, Any] = {}
    for name, value in cast(Mapping[object, object], settings).items():
        section, dot, key = str(name).partition(".")
        if isinstance(value, os.PathLike):
            value = os.fsdecode(cast(os.PathLike[str], value))
        _merge(nested, {section: {key: value}} if dot else {section: value})
    return nested


def text_use(**given: object) -> TextUse:
    """Return how a text is used, by the keys that are not None; raises ArgumentError."""
    try:
        return TextUse.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise ArgumentError(_explain(error)) from None


def _find_recipe(name_or_path: str) -> Path:
    """Return the file of a recipe given by path or shipped name; raises RecipeError."""
    if "\0" not in name_or_path:
        for path in (Path(name_or_path), recipes_folder() / f"{name_or_path}.yaml"):
            try:
                if path.is_file():
                    return path
            except OSError as error:
                raise RecipeError(
                    f"recipe {shortened(name_or_path)}: cannot be read ({error.strerror}). Check path and permissions."
                ) from None
    raise RecipeError(
        f"recipe {shortened(name_or_path)}: neither a file nor a shipped recipe. "
        f"Shipped: {', '.join(shipped_recipes())}."
    )


def build_recipe(document: dict[str, Any], *, where: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Check a recipe document with its overrides; raises RecipeError naming file or overrides, and what is allowed."""
    merged = dict(document)
    _merge(merged, _nested(overrides or {}))
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        if overrides:
            with suppress(ValidationError):  # the file itself is wrong
                where = f"recipe {shortened(Recipe.model_validate(document).name)} with the given settings"
        raise RecipeError(f"{where}: {_explain(error)}") from None


def _merge(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        below = document.get(key)
        is_section = isinstance(value, dict) and isinstance(below, dict)
        document[key] = cast(dict[str, Any], below) | value if is_section else value


def _explain(error: ValidationError) -> str:
    problems: list[str] = []
    models = {"input_scale": InputScale, "budget": Budget, "calibration": TextUse}
    for problem in error.errors():
        key = ".".join(part for part in problem["loc"] if isinstance(part, str))  # without the number in a list
        if problem["type"] == "extra_forbidden":
            model = models.get(str(problem["loc"][0]), Recipe)
            known = f"; known keys: {', '.join(model.model_fields)}"  # once for each model
            problems.append(f"unknown key {quoted(key)}{'' if any(known in part for part in problems) else known}")
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            if reason.startswith("Input should be "):
                expected = reason.removeprefix("Input should be ").replace("a valid ", "a ")
                reason = f"{quoted(problem['input'])} must be {expected}"
            if problem["type"] == "tuple_type":
                example = "[attention]" if key == "fp8" else "[experts, shared_experts]"
                reason = f"must be a list, as in `{key}: {example}` or --set '{key}={example}'"
            problems.append(f"{shortened(key)}: {reason}" if key else reason)
    return "; ".join(problems[:MAX_PROBLEMS])
