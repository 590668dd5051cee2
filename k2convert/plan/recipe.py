"""Recipes: what to convert and how, as data. YAML in, a frozen and complete object out.

A recipe names roles, never regular expressions. Unknown keys are refused: a misspelled key would otherwise change the
result without a message.
"""

from pathlib import Path
from typing import Annotated, Any, Final, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from k2convert.choices import Activations, KvCache, Layout, QuantizerKind, RoleName, Rule, Target
from k2convert.errors import PlanError, RecipeError, cut, quoted, shortened
from k2convert.models import find_family
from k2convert.quantize.rules import RULES


def _is_fp32_scale(value: float) -> float:
    # One layout stores the scale, the other its reciprocal.
    if not 2.0**-126 <= value <= 2.0**126:
        raise ValueError("must be between 1.2e-38 and 8.5e+37, because it and its reciprocal are stored in FP32")
    return value


def _is_family(value: str) -> str:
    try:
        return find_family(value).name
    except PlanError as error:
        raise ValueError(str(error)) from None


Fp32Scale = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_is_fp32_scale)]

MAX_RECIPE_BYTES: Final = 1 << 20
MAX_PROBLEMS: Final = 5  # of one recipe, in one message

_FORBID = ConfigDict(extra="forbid", frozen=True)


class InputScale(BaseModel):
    """Constant activation scales: activation amax / 2688, one for gate and up, one for down."""

    model_config = _FORBID
    gate_up: Fp32Scale = 1.0
    down: Fp32Scale = 1.0


class Budget(BaseModel):
    """The least SQNR in dB that `validate` accepts: of a converted tensor, a reference layer, one expert of it."""

    model_config = _FORBID
    tensor_sqnr_db: float = 17.0
    layer_sqnr_db: float = 15.0
    expert_sqnr_db: float = 12.0


class Recipe(BaseModel):
    """One kind of result: which roles become NVFP4, by which rule, in which layout, and which experts are kept.

    `purpose` is one sentence for people: whom the recipe serves. The result does not depend on it.
    `keep_experts` is the path of a file that lists or scores the experts, `experts` how many to keep by scores.
    """

    model_config = _FORBID
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    purpose: str = ""
    family: Annotated[str, AfterValidator(_is_family)] | None = None
    target: Target = "nvfp4"
    layout: Layout = "modelopt"
    rule: Rule = "optimal"
    quantizer: QuantizerKind = "native"
    activations: Activations = "w4a4"
    norm_scaling: bool | None = None
    roles: tuple[RoleName, ...] = ("experts",)
    input_scale: InputScale = InputScale()
    kv_cache: KvCache | None = None
    budget: Budget = Budget()
    keep_experts: Annotated[str, Field(min_length=1)] | None = None
    experts: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "Recipe":
        if len(set(self.roles)) != len(self.roles):
            raise ValueError("roles: a role is repeated; remove one")
        if "experts" not in self.roles:
            raise ValueError("roles: must contain 'experts', because the source's INT4 weights are the routed experts")
        if self.quantizer == "reference" and not RULES[self.rule].is_modelopt:
            known = " or ".join(f"'rule: {rule}'" for rule, arithmetic in RULES.items() if arithmetic.is_modelopt)
            raise ValueError(f"quantizer 'reference' does not support rule {self.rule!r}; add {known}")
        if self.norm_scaling and self.quantizer == "reference":
            raise ValueError("quantizer 'reference' does not support norm scaling; remove 'norm_scaling'")
        if self.norm_scaling and self.target != "nvfp4":
            raise ValueError(f"norm scaling is for NVFP4; remove 'norm_scaling' or 'target: {self.target}'")
        return self

    def document(self) -> dict[str, Any]:
        """Return the resolved recipe as plain data, with every default; `norm_scaling` only if it is set.

        Without the experts to keep: the ledger has them themselves (records/pruning.py), wherever they were read from.
        Without the purpose.
        """
        document = self.model_dump(mode="json", exclude={"keep_experts", "experts", "purpose"})
        if self.norm_scaling is None:
            del document["norm_scaling"]
        return document


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that come with k2convert."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def load_recipe(name_or_path: str, **overrides: Any) -> Recipe:
    """Load a recipe by shipped name or by path. `overrides` that are not None replace its fields."""
    path = _find_recipe(name_or_path)
    try:
        text = _read_text(path)
        repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
        document: Any = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # values too: a date, a number of digits
        raise RecipeError(f"{path}: not YAML ({cut(str(error))}). Start from a shipped recipe.") from None
    if repeated is not None:
        raise RecipeError(f"{path}: duplicate key {quoted(repeated)}. Remove one.")
    if not isinstance(document, dict):
        raise RecipeError(f"{path}: a recipe must be a mapping of keys to values. Start from a shipped one.")
    return build_recipe(cast(dict[str, Any], document), where=str(path), **overrides)


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


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror}). Check permissions and disk.") from None
    if len(raw) > MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: larger than {MAX_RECIPE_BYTES:,} bytes, so not a recipe. Start from a shipped one.")
    return raw.decode("utf-8")


def build_recipe(document: dict[str, Any], *, where: str, **overrides: Any) -> Recipe:
    """Check a recipe document; raises RecipeError naming file, key and what is allowed.

    If the document alone is correct, the message names the overrides, not the document.
    """
    given = {key: value for key, value in overrides.items() if value is not None}
    try:
        return Recipe.model_validate(document | given)
    except ValidationError as error:
        if given and _is_recipe(document):
            where = ", ".join(f"{key} {value}" for key, value in given.items())
        raise RecipeError(f"{where}: {_explain(error)}") from None


def _is_recipe(document: dict[str, Any]) -> bool:
    try:
        Recipe.model_validate(document)
    except ValidationError:
        return False
    return True


def input_scale_problem(value: float) -> str:
    """Return why `value` cannot be an activation scale; empty if it can."""
    try:
        InputScale(gate_up=value)
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return ""


def _explain(error: ValidationError) -> str:
    parts: list[str] = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            model = {"input_scale": InputScale, "budget": Budget}.get(str(problem["loc"][0]), Recipe)
            known = f"; known keys: {', '.join(model.model_fields)}"  # once for each model
            parts.append(f"unknown key {quoted(place)}{'' if any(known in part for part in parts) else known}")
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            parts.append(f"{shortened(place)}: {reason}" if place else reason)
    return "; ".join(parts[:MAX_PROBLEMS])


def _repeated_key(node: yaml.Node | None) -> str | None:
    """Return the first key that appears twice in one mapping, or None. YAML itself would take the last value."""
    seen: set[str] = set()
    waiting, visited = [node], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in visited:  # an alias: walking it again could take forever
            continue
        visited.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            seen.clear()
            for key, value in node.value:
                if str(key.value) in seen:
                    return str(key.value)
                seen.add(str(key.value))
                waiting.append(value)
    return None
