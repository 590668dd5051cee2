"""A good checkpoint passes all nineteen rules, whatever its layout, name style, activations and expert count."""

from types import SimpleNamespace

import pytest
from converted import Converted, check, verdicts

from k2convert.check.contract.result import read_result
from k2convert.check.contract.scan import scan_shards
from k2convert.check.results import Verdict
from k2convert.checkpoint.index import open_checkpoint
from k2convert.checkpoint.reader import Bytes
from k2convert.records.events import Events


@pytest.mark.quick(4)
def test_every_rule_passes(good: Converted) -> None:
    result = read_result(good.folder, source=open_checkpoint(good.source))
    errors = {
        module.name: SimpleNamespace(sqnr_db=20.0, changed_codes=None, is_zero=False) for module in result.converted
    }
    report = check(good.folder, source=good.source, errors=errors)
    # `max` may choose block scales that Hopper flushes; they are counted, not refused. `mse` chooses none.
    assert {n: v for n, v in verdicts(report).items() if n != 5 or good.kind.rule == "mse"} == {}
    assert report.passed
    assert [rule.number for rule in report.rules] == list(range(1, 20))
    assert [rule.number for rule in report.rules if rule.verdict is Verdict.SKIPPED] == []
    assert (report.layout, report.activations) == (good.kind.layout, good.kind.activations)


@pytest.mark.quick(4)
def test_without_a_source_the_rules_that_need_one_say_so(good: Converted) -> None:
    report = check(good.folder)
    skipped = {rule.number: rule.note for rule in report.rules if rule.verdict is Verdict.SKIPPED}
    assert skipped == dict.fromkeys((7, 8, 12, 17, 18), "needs --source")
    assert report.passed


def test_layout_and_activations_are_told_from_the_tensors_without_ledger_and_source(good: Converted) -> None:
    result = read_result(good.folder, source=None)
    assert (result.names.name, result.has_input_scale) == (good.kind.layout, good.kind.activations == "w4a4")


def test_a_foreign_checkpoint_fails_only_for_its_missing_ledger(modelopt: Converted) -> None:
    (modelopt.folder / "k2convert.json").unlink()
    assert verdicts(modelopt.check()) == {19: Verdict.FAIL}


class Sizes(Events):
    """A visitor and an event sink that count bytes."""

    def __init__(self) -> None:
        self.tensors: dict[str, int] = {}
        self.shards: dict[str, int] = {}
        self.bytes_in = 0

    def tensor(self, module: str, parameter: str, data: Bytes) -> None:
        assert f"{module}.{parameter}" not in self.tensors
        self.tensors[f"{module}.{parameter}"] = data.nbytes

    def shard_bytes(self, shard: str, data: Bytes) -> None:
        self.shards[shard] = self.shards.get(shard, 0) + data.nbytes

    def progress(self, *, bytes_in: int = 0, bytes_out: int = 0, tensors: int = 0) -> None:
        self.bytes_in += bytes_in


def test_visitors_get_every_shard_and_every_converted_tensor_once_and_whole(good: Converted) -> None:
    result = read_result(good.folder, source=None)
    sizes = Sizes()
    scan_shards(result, shard_visitor=sizes.shard_bytes, tensor_visitor=sizes.tensor, events=sizes)
    assert sizes.tensors == {f"{m.name}.{p}": t.num_bytes for m in result.converted for p, t in m.parameters.items()}
    assert sizes.shards == {name: header.file_bytes for name, header in result.headers.items()}
    assert sizes.bytes_in == sum(tensor.num_bytes for tensor in result.tensors.values())


def test_report_as_json_has_number_verdict_count_and_offenders(modelopt: Converted) -> None:
    (modelopt.folder / "tokenizer.json").write_text("{}")
    document = modelopt.check().to_dict()
    assert (document["passed"], document["failed"]) == (False, [17])
    rule = document["rules"][16]
    assert {key: rule[key] for key in ("number", "verdict", "count")} == {"number": 17, "verdict": "fail", "count": 1}
    assert list(rule["offenders"]) == [{"name": "tokenizer.json", "problem": "differs from the source's"}]


def test_many_offenders_are_counted_and_the_first_few_named(modelopt: Converted) -> None:
    for number in range(30):
        (modelopt.folder / f"{number:02d}.tmp").write_bytes(b"")
    rule = modelopt.check().rules[15]
    assert (rule.verdict, rule.count, len(rule.offenders)) == (Verdict.FAIL, 30, 8)
