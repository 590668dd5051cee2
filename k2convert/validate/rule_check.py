"""Which rule a result was converted by, which modules share a global scale, and what the check by the rule found."""

from collections import defaultdict
from collections.abc import Mapping

from k2convert.choices import Rule
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, WEIGHT_PACKED, Role, TensorName
from k2convert.plan.recipe import Recipe
from k2convert.quantize.rules import RULES
from k2convert.records.fingerprint import ARITHMETIC_VERSION
from k2convert.records.ledger import Ledger
from k2convert.validate.contract.subject import Subject
from k2convert.validate.results import RuleReport
from k2convert.validate.weights import CheckedWeight


def checkable_rule(ledger: Ledger | None, recipe: Recipe | None, *, has_statistics: bool) -> tuple[Rule | None, str]:
    """Return the rule by which the weights can be made again; None, and why, if they cannot.

    `has_statistics` says whether the importance of the columns is known, which some rules need. Weights of a rule that
    needs a walk can always be measured, see `is_measured_only`.
    """
    if ledger is None:
        return None, "no ledger says by which rule the weights were converted"
    if recipe is None:
        return None, f"this version does not know the ledger's recipe (rule {ledger.recipe.get('rule')!r})"
    if recipe.quantizer != "native":
        return None, f"the recipe's quantizer is {recipe.quantizer!r}, whose arithmetic is not k2convert's own"
    version = ledger.fingerprint.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        return None, f"the ledger states arithmetic {version!r}, this version has {ARITHMETIC_VERSION}"
    if RULES[recipe.rule].uses_importance and not has_statistics and not RULES[recipe.rule].needs_walk:
        return None, f"the rule {recipe.rule} needs the statistics of the conversion: pass them with --statistics"
    return recipe.rule, ""


def is_measured_only(rule: Rule | None, role: Role, *, has_statistics: bool) -> bool:
    """Return whether the codes of a module cannot be made again, because a walk made them or their statistics are not
    here.
    """
    return rule is not None and RULES[rule].needs_walk and (role is Role.EXPERTS or not has_statistics)


def sharing_modules(subject: Subject) -> dict[str, dict[str, TensorName]]:
    """Return the modules of the source by sharing key: those with one key have one global scale."""
    sharing: dict[str, dict[str, TensorName]] = defaultdict(dict)
    for parts in subject.source_names.values():
        if parts.role in CONVERTIBLE_ROLES and parts.parameter in (WEIGHT, WEIGHT_PACKED):
            sharing[parts.sharing_key][parts.module] = parts
    return dict(sharing)


def rule_report(rule: Rule | None, skip_reason: str, checked: Mapping[str, CheckedWeight]) -> RuleReport:
    """Sum up the check by the rule."""
    has_walk = rule is not None and RULES[rule].needs_walk
    if rule is not None and not checked:
        skip_reason = "no tensor could be measured"
    return RuleReport(
        rule=rule,
        skip_reason=skip_reason,
        tensors=len(checked) if rule is not None else 0,
        measured=sum(not found.num_blocks for found in checked.values()) if has_walk else 0,
        blocks=sum(found.num_blocks for found in checked.values()),
        sampled_blocks=sum(found.sampled_blocks for found in checked.values()),
        mismatches={module: "; ".join(found.problems) for module, found in checked.items() if found.problems},
    )
