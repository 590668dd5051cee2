"""Compares our matchers of exclude lists with the engines' own functions, extracted from their wheels.

    pip download --no-deps vllm==0.33.0 sglang==0.5.23
    python -m scripts.engine_matchers --vllm vllm-*.whl --sglang sglang-*.whl [--tensorrt-llm F]

The functions are cut out of the source by name and executed in this process, without their packages. Nothing of them is
kept. F is a Python file that contains TensorRT-LLM's `QuantConfig.is_module_excluded_from_quantization`.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "validation" / "contract"))

from matcher_cases import LISTS, modules_of
from test_matchers import naming, sglang, sglang_packed, tensorrt_llm, tensorrt_llm_subtree, vllm, vllm_packed

from k2convert.check.contract import matchers

FORMS = ("{}", "{}", "*{}", "{}*", "*{}*", "{}.*", "re:.*{}", "re:{}.*", "re:.*{}$")
K25_CLASS = "KimiK25ForConditionalGeneration"
Outcome = bool | str
Matcher = Callable[[str, list[str], bool], bool]


def cut(source: str, *names: str, within: str | None = None) -> str:
    """Return the source of top-level definitions, or of those in class `within`, dedented by parsing."""
    body: list[ast.stmt] = ast.parse(source).body
    if within is not None:
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == within).body
    found = [
        node
        for node in body
        if {getattr(node, "name", None), *(getattr(t, "id", None) for t in getattr(node, "targets", []))} & {*names}
    ]
    assert len(found) == len(names), (names, within, len(found))
    return "\n".join(ast.unparse(node) for node in found)


def define(*texts: str, **extra: Any) -> dict[str, Any]:
    """Execute extracted definitions in a namespace with the names they use."""
    space: dict[str, Any] = {
        "Any": Any, "Iterable": Iterable, "Mapping": Mapping, "MappingProxyType": MappingProxyType,
        "Literal": Literal, "List": list, "re": re, "fnmatch": fnmatch, "lru_cache": lru_cache,
        "dataclass": dataclass, "field": field, "replace": replace,
    } | extra  # fmt: skip
    exec(compile("from __future__ import annotations\n" + "\n".join(texts), "<engine>", "exec"), space)
    return space


def mapper_from(mapper_source: str, model_source: str, attribute: str, class_name: str) -> Any:
    space = define(cut(mapper_source, "WeightsMapper"), logger=SimpleNamespace(warning_once=print))
    exec(cut(model_source, attribute, within=class_name), space)
    return space[attribute]


class VllmReal:
    """vLLM's own functions, both layouts; module names as vLLM builds them."""

    def __init__(self, wheel: Path) -> None:
        read = reader_of(wheel, "vllm/model_executor/")
        quantization = read("layers/quantization/modelopt.py")
        utils = read("layers/quantization/utils/quant_utils.py")
        skipped = define(cut(utils, "is_layer_skipped"))["is_layer_skipped"]
        methods = cut(quantization, "is_layer_excluded", "apply_vllm_mapper", within="ModelOptQuantConfigBase")
        self.modelopt = define(methods, is_layer_skipped=skipped)
        config = define(
            cut(read("layers/quantization/utils/config_utils.py"), "find_matching_patterns", "is_equal_or_regex_match"),
            cut(read("layers/quantization/compressed_tensors/utils.py"), "should_ignore_layer"),
        )
        self.should_ignore = config["should_ignore_layer"]
        packed = read("layers/quantization/compressed_tensors/compressed_tensors.py")
        renaming = define(cut(packed, "apply_vllm_mapper", within="CompressedTensorsConfig"))
        self.ct_map = renaming["apply_vllm_mapper"]
        self.mapper = mapper_from(read("models/utils.py"), read("models/kimi_k25.py"), "hf_to_vllm_mapper", K25_CLASS)
        fused = cut(read("models/deepseek_v2.py"), "packed_modules_mapping", within="DeepseekV2ForCausalLM")
        self.fused = define(fused)["packed_modules_mapping"] | {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}

    def excludes(self, module: str, entries: list[str], wrapped: bool) -> bool:
        config = SimpleNamespace(exclude_modules=list(entries), packed_modules_mapping=self.fused)
        if wrapped:
            self.modelopt["apply_vllm_mapper"](config, self.mapper.get_rename_mapper())
        return self.modelopt["is_layer_excluded"](config, module)

    def ignores(self, module: str, entries: list[str], wrapped: bool) -> bool:
        config = SimpleNamespace(ignore=list(entries), target_scheme_map={}, kv_cache_scheme=None)
        if wrapped:
            self.ct_map(config, self.mapper.get_rename_mapper())
        return self.should_ignore(module, ignore=config.ignore, fused_mapping=self.fused)


class SglangReal:
    """SGLang's own functions, both layouts."""

    def __init__(self, wheel: Path) -> None:
        read = reader_of(wheel, "sglang/srt/")
        quantization = read("layers/quantization/modelopt_quant.py")
        methods = cut(quantization, "is_layer_excluded", "apply_weight_name_mapper", within="ModelOptQuantConfig")
        skip = cut(read("layers/quantization/utils.py"), "_module_path_match", "is_layer_skipped")
        fallback = (
            '_FALLBACK_FUSED_SHARDS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], '
            '"gate_up_proj": ["gate_proj", "up_proj"]}'
        )
        self.modelopt = define(cut(quantization, "_compile_exclusion_pattern"), methods, fallback, skip)
        ct = cut(
            read("layers/quantization/compressed_tensors/utils.py"),
            "should_ignore_layer",
            "check_equal_or_regex_match",
            "_is_equal_or_regex_match",
        )
        self.should_ignore = define(ct, Optional=object)["should_ignore_layer"]
        self.mapper = mapper_from(read("models/utils.py"), read("models/kimi_k25.py"), "hf_to_sglang_mapper", K25_CLASS)
        self.fused = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}

    def excludes(self, module: str, entries: list[str], wrapped: bool) -> bool:
        config = SimpleNamespace(exclude_modules=list(entries))
        if wrapped:
            self.modelopt["apply_weight_name_mapper"](config, self.mapper)
        excluded = self.modelopt["is_layer_excluded"]
        if module.endswith(".experts"):  # _get_quant_method asks the globs alone for FusedMoE
            return excluded(config, module)
        return self.modelopt["is_layer_skipped"](module, config.exclude_modules, self.fused) or excluded(config, module)

    def ignores(self, module: str, entries: list[str], wrapped: bool) -> bool:
        ignore = self.mapper.apply_list(list(entries)) if wrapped else list(entries)
        return self.should_ignore(module, ignore=ignore, fused_mapping=self.fused)


def tensorrt_llm_real(path: Path) -> Matcher:
    text = cut(path.read_text(), "is_module_excluded_from_quantization", within="QuantConfig")
    method = define(text, fnmatch=SimpleNamespace(fnmatch=fnmatch))["is_module_excluded_from_quantization"]
    return lambda module, entries, wrapped: method(
        SimpleNamespace(exclude_modules=matchers.map_tensorrt_llm_excludes(entries, naming(wrapped))), module
    )


def reader_of(wheel: Path, root: str) -> Callable[[str], str]:
    archive = zipfile.ZipFile(wheel)
    return lambda name: archive.read(root + name).decode()


def outcome(matcher: Matcher, module: str, entries: list[str], wrapped: bool) -> Outcome:
    """Return True, False, or "refused" if it raises."""
    try:
        return bool(matcher(module, entries, wrapped))
    except (ValueError, re.error):
        return "refused"


def random_lists(seed: int, count: int, pool: Sequence[str]) -> Iterator[list[str]]:
    """Lists of one to six entries: whole names, parts of them, globs and regular expressions made of both."""
    draw = random.Random(seed)
    for _ in range(count):
        entries: list[str] = []
        for _ in range(draw.randint(1, 6)):
            parts = draw.choice(pool).split(".")
            begin = draw.randrange(len(parts))
            end = draw.randint(begin + 1, len(parts))
            text = ".".join(parts[begin:end] if draw.random() < 0.6 else parts)
            entries.append(draw.choice(FORMS).format(text))
        yield entries


def compare(name: str, real: Matcher, ours: Matcher, engine: str, fuzz: int) -> bool:
    """Run both on every list and module; prints the tally and the first disagreements."""
    tally: Counter[str] = Counter()
    for wrapped in (False, True):
        modules = modules_of(engine, wrapped=wrapped)
        pool = modules + modules_of("checkpoint", wrapped=wrapped)
        for entries in (*LISTS.values(), *random_lists(1 + wrapped, fuzz, pool)):
            for module in modules:
                theirs = outcome(real, module, entries, wrapped)
                mine = outcome(ours, module, entries, wrapped)
                tally[f"{theirs}"] += 1
                if theirs != mine:
                    tally["DISAGREE"] += 1
                    if tally["DISAGREE"] <= 5:
                        sys.stdout.write(f"  {name}: {module} {entries}: theirs {theirs}, ours {mine}\n")
    sys.stdout.write(f"{name}: {dict(tally)}\n")
    return not tally["DISAGREE"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--tensorrt-llm", type=Path, nargs="*", default=[])
    parser.add_argument("--fuzz", type=int, default=2000, help="random lists for each engine and name style")
    options = parser.parse_args()
    good = True
    for name, wheel, kind, modelopt, packed in (
        ("vLLM", options.vllm, VllmReal, vllm, vllm_packed),
        ("SGLang", options.sglang, SglangReal, sglang, sglang_packed),
    ):
        if wheel:
            real = kind(wheel)
            good &= compare(f"{name}, modelopt", real.excludes, modelopt, name, options.fuzz)
            good &= compare(f"{name}, compressed-tensors", real.ignores, packed, name, options.fuzz)
    for path in options.tensorrt_llm:
        is_subtree = "rsplit" in path.read_text()
        good &= compare(
            f"TensorRT-LLM, {path.name}",
            tensorrt_llm_real(path),
            tensorrt_llm_subtree if is_subtree else tensorrt_llm,
            "TensorRT-LLM" if not is_subtree else "TensorRT-LLM, unfused",
            options.fuzz,
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
