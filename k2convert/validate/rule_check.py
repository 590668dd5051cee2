"""Which rule a result was converted by, which modules share a global scale, and what the check by the rule found."""

from collections import defaultdict
from collections.abc import Mapping

from k2convert.choices import Rule
from k2convert.models.names import CONVERTIBLE_ROLES, WEIGHT, WEIGHT_PACKED, TensorName
from k2convert.plan.recipe import Recipe
from k2convert.records.fingerprint import ARITHMETIC_VERSION
from k2convert.records.ledger import Ledger
from k2convert.validate.contract.subject import Subject
from k2convert.validate.results import RuleReport
from k2convert.validate.weights import CheckedWeight


def checkable_rule(ledger: Ledger | None, recipe: Recipe | None) -> tuple[Rule | None, str]:
    """Return the rule by which the weights can be made again; None, and why, if they cannot."""
    if ledger is None:
        return None, "no ledger says by which rule the weights were converted"
    if recipe is None:
        return None, f"this version does not know the ledger's recipe (rule {ledger.recipe.get('rule')!r})"
    if recipe.quantizer != "native":
        return None, f"the recipe's quantizer is {recipe.quantizer!r}, whose arithmetic is not k2convert's own"
    version = ledger.fingerprint.get("arithmetic")
    if version != ARITHMETIC_VERSION:
        return None, f"the ledger states arithmetic {version!r}, this version has {ARITHMETIC_VERSION}"
    return recipe.rule, ""


def sharing_modules(subject: Subject) -> dict[str, dict[str, TensorName]]:
    """Return the modules of the source by sharing key: those with one key have one global scale."""
    sharing: dict[str, dict[str, TensorName]] = defaultdict(dict)
    for parts in subject.source_names.values():
        if parts.role in CONVERTIBLE_ROLES and parts.parameter in (WEIGHT, WEIGHT_PACKED):
            sharing[parts.sharing_key][parts.module] = parts
    return dict(sharing)


def rule_report(rule: Rule | None, skip_reason: str, checked: Mapping[str, CheckedWeight]) -> RuleReport:
    """Sum up the check by the rule."""
    if rule is not None and not checked:
        skip_reason = "no tensor could be measured"
    return RuleReport(
        rule=rule,
        skip_reason=skip_reason,
        tensors=len(checked) if rule is not None else 0,
        blocks=sum(found.num_blocks for found in checked.values()),
        sampled_blocks=sum(found.sampled_blocks for found in checked.values()),
        mismatches={module: "; ".join(found.problems) for module, found in checked.items() if found.problems},
    )
