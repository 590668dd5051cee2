"""Answers questions that need no checkpoint, by an engine's own code: `questions ENGINE REQUEST ANSWER`, both JSON.

commands    which of these command lines the server's parser refuses, and which options it has
lists       which modules each exclude list excludes, in both layouts: True, False or "refused"
documents   what is wrong with a question of compare_servers, and with the answers of the tests' server
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

from scripts.engine_checks.clients import sglang_on_cpu, vllm_on_cpu

Excludes = Callable[[list[str], bool], Callable[[str], bool]]
"""Takes a list, and whether names have K2.5's prefix. The result says of a module whether the list excludes it."""


class Vllm:
    skipped_words = 1  # `serve`, before the options

    def __init__(self) -> None:
        vllm_on_cpu.enable(is_weight_only=False)

    def parser(self) -> argparse.ArgumentParser:
        from vllm.entrypoints.common.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        return make_arg_parser(FlexibleArgumentParser())

    def exclude_lists(self) -> dict[str, Excludes]:
        from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsConfig,
        )
        from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer
        from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
        from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM
        from vllm.model_executor.models.kimi_k25 import KimiK25ForConditionalGeneration

        mapper = KimiK25ForConditionalGeneration.hf_to_vllm_mapper.get_rename_mapper()
        fused = DeepseekV2ForCausalLM.packed_modules_mapping | {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}

        def modelopt(entries: list[str], wrapped: bool) -> Callable[[str], bool]:
            config = SimpleNamespace(exclude_modules=list(entries), packed_modules_mapping=fused)
            if wrapped:
                ModelOptNvFp4Config.apply_vllm_mapper(config, mapper)
            return lambda module: ModelOptNvFp4Config.is_layer_excluded(config, module)

        def packed(entries: list[str], wrapped: bool) -> Callable[[str], bool]:
            config = SimpleNamespace(ignore=list(entries), target_scheme_map={}, kv_cache_scheme=None)
            if wrapped:
                CompressedTensorsConfig.apply_vllm_mapper(config, mapper)
            return lambda module: should_ignore_layer(module, ignore=config.ignore, fused_mapping=fused)

        return {"modelopt": modelopt, "compressed-tensors": packed}

    def check_documents(self, documents: dict[str, Any]) -> Iterator[str]:
        """Yield the fields that no class of vLLM has, and where an answer is not as vLLM writes it."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
        from vllm.entrypoints.serve.engine.protocol import ModelList

        for name, kind in (("question", CompletionRequest), ("answer", CompletionResponse), ("models", ModelList)):
            read = kind.model_validate(documents[name])
            for field in unknown_fields(read):
                yield f"{name}: vLLM knows no field {field}"
            if name == "answer" and read.model_dump(mode="json") != documents[name]:
                yield "the answer is not as vLLM writes it"


class Sglang:
    skipped_words = 2  # `-m sglang.launch_server`

    def __init__(self) -> None:
        sglang_on_cpu.enable()

    def parser(self) -> argparse.ArgumentParser:
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        return parser

    def exclude_lists(self) -> dict[str, Excludes]:
        from sglang.srt.layers.quantization.compressed_tensors.utils import should_ignore_layer
        from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config
        from sglang.srt.layers.quantization.utils import is_layer_skipped
        from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration

        mapper = KimiK25ForConditionalGeneration.hf_to_sglang_mapper
        fused = {"fused_qkv_a_proj_with_mqa": ["q_a_proj", "kv_a_proj_with_mqa"]}

        def modelopt(entries: list[str], wrapped: bool) -> Callable[[str], bool]:
            config = SimpleNamespace(exclude_modules=list(entries))
            if wrapped:
                ModelOptFp4Config.apply_weight_name_mapper(config, mapper)

            def excludes(module: str) -> bool:
                # SGLang asks the globs alone for a bank of experts.
                if not module.endswith(".experts") and is_layer_skipped(module, config.exclude_modules, fused):
                    return True
                return ModelOptFp4Config.is_layer_excluded(config, module)

            return excludes

        def packed(entries: list[str], wrapped: bool) -> Callable[[str], bool]:
            ignore = mapper.apply_list(list(entries)) if wrapped else list(entries)
            return lambda module: should_ignore_layer(module, ignore=ignore, fused_mapping=fused)

        return {"modelopt": modelopt, "compressed-tensors": packed}

    def check_documents(self, documents: dict[str, Any]) -> Iterator[str]:
        """Let SGLang write the answer with the same log-probabilities, and yield what differs."""
        from sglang.srt.entrypoints.openai.protocol import ModelList
        from sglang.srt.managers.io_struct import GenerateReqInput
        from sglang.srt.managers.tokenizer_manager import TokenizerManager

        question = GenerateReqInput(**documents["question"])
        question.normalize_batch_and_arguments()
        wanted = documents["answer"]["meta_info"]
        tokens = wanted["input_token_logprobs"]
        tops = [row or [] for row in wanted["input_top_logprobs"]]
        kinds = [f"{side}_{name}" for side in ("input", "output") for name in ("token_logprobs", "top_logprobs")]
        empty: dict[str, list[Any]] = {f"{kind}{part}": [] for kind in kinds for part in ("", "_val", "_idx")}
        state = SimpleNamespace(**empty, obj=question)
        state.input_token_logprobs_val = [token[0] for token in tokens]
        state.input_token_logprobs_idx = [token[1] for token in tokens]
        state.input_top_logprobs_val = [[entry[0] for entry in row] for row in tops]
        state.input_top_logprobs_idx = [[entry[1] for entry in row] for row in tops]
        written: dict[str, Any] = {}
        TokenizerManager.__new__(TokenizerManager).add_logprob_to_meta_info(
            written, state, question.top_logprobs_num, None, question.return_text_in_logprobs, finished=True
        )
        for key in ("input_token_logprobs", "input_top_logprobs"):
            if json.loads(json.dumps(written[key])) != wanted[key]:
                yield f"{key}: not as SGLang writes it"
        cards = documents["models"]["data"]
        for card in ModelList.model_validate(documents["models"]).model_dump()["data"]:
            if card not in cards:
                yield f"models: not as SGLang writes them: {card}"


def unknown_fields(model: BaseModel) -> Iterator[str]:
    """Yield the fields of a document, and of those in it, that its class does not have."""
    yield from model.model_extra or {}
    for value in vars(model).values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, BaseModel):
                yield from unknown_fields(part)


def refused_commands(parser: argparse.ArgumentParser, commands: list[list[str]]) -> Iterator[str]:
    """Yield what the parser says of each command that it refuses. Abbreviations are refused, too."""
    parser.allow_abbrev = False
    for words in commands:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                parser.parse_args(words)
        except SystemExit:
            lines = printed.getvalue().strip().splitlines() or ["refused"]
            yield f"{' '.join(words)}: {lines[-1]}"


def options_of(parser: argparse.ArgumentParser) -> dict[str, str | list[str]]:
    """Return what each option takes: "flag" for nothing, "int", "float", "str", or one of a list."""
    options: dict[str, str | list[str]] = {}
    for action in parser._actions:
        kind = action.type.__name__ if action.type in (int, float) else "str"
        if action.choices:
            kind = [str(choice) for choice in action.choices]
        if action.nargs == 0:
            kind = "flag"
        options |= {name: kind for name in action.option_strings if name.startswith("--")}
    return options


def excluded(excludes: Excludes, case: dict[str, Any]) -> Iterator[list[bool | str]]:
    """Yield a row for each list: the outcome for each module, "refused" if the engine raises."""
    for entries in case["lists"]:
        row: list[bool | str] = []
        for module in case["modules"]:
            try:
                row.append(bool(excludes(entries, case["wrapped"])(module)))
            except (ValueError, re.error):
                row.append("refused")
        yield row


def main() -> int:
    name, request, answer = sys.argv[1:]
    request_document = json.loads(Path(request).read_text(encoding="utf-8"))
    engine = {"vllm": Vllm, "sglang": Sglang}[name]()
    parser = engine.parser()
    functions = engine.exclude_lists()
    commands = [words[engine.skipped_words :] for words in request_document["commands"]]
    answers = {
        "version": importlib.metadata.version(name).partition("+")[0],
        "options": options_of(parser),
        "commands": list(refused_commands(parser, commands)),
        "lists": [list(excluded(functions[case["layout"]], case)) for case in request_document["lists"]],
        "documents": list(engine.check_documents(request_document["documents"])),
    }
    Path(answer).write_text(json.dumps(answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
