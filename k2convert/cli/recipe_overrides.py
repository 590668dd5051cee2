"""What the options of `run` replace in a recipe, and which of them contradict each other."""

from typing import Any

import typer

from k2convert.choices import KvCache, Layout, Rule
from k2convert.cli.options import RunOptions


def recipe_overrides(options: RunOptions) -> dict[str, Any]:
    """Return what the options replace in a recipe; raises BadParameter for options that contradict each other."""
    scales = _input_scales(options.input_scale, options.down_input_scale)
    for_nvfp4 = {
        "--rule": options.rule,
        "--layout": options.layout,
        "--activations": options.activations,
        "--quantizer": options.quantizer,
        "--statistics": options.statistics,
        "--calibrate": options.calibrate,
        "--token-ids": options.token_ids,
        "--norm-scaling": options.norm_scaling,
        "--kv-cache": options.kv_cache,
        "--input-scale and --down-input-scale": scales,
    }
    given = [name for name, value in for_nvfp4.items() if value is not None]
    if options.to in ("bf16", "int4") and given:
        does = "dequantizes the weights" if options.to == "bf16" else "drops experts"
        raise typer.BadParameter(f"--to {options.to} only {does}: leave out {', '.join(given)}")
    check_kv_cache(options.layout, options.kv_cache)
    rule = _check_text(options) if has_text(options) else options.rule
    if options.quantizer == "reference":  # it has only one rule
        if rule not in (None, "plain"):
            raise typer.BadParameter(f"--quantizer reference only works with --rule plain, not with --rule {rule}")
        if options.statistics is not None or options.norm_scaling:
            raise typer.BadParameter("--quantizer reference uses no statistics: leave out --statistics, --norm-scaling")
        rule = "plain"
    if options.norm_scaling and options.statistics is None and not has_text(options):
        raise typer.BadParameter("--norm-scaling needs --statistics FILE; `k2convert calibrate` makes one")
    if rule is None and options.statistics is not None:
        rule = "weighted"
    return {
        "rule": rule,
        "layout": options.layout,
        "activations": options.activations,
        "quantizer": options.quantizer,
        "norm_scaling": options.norm_scaling,
        "target": options.to,
        "keep_experts": None if options.keep_experts is None else str(options.keep_experts),
        "experts": options.experts,
        "kv_cache": options.kv_cache,
        "input_scale": scales,
    }


def has_text(options: RunOptions) -> bool:
    """Return whether a run calibrates while it converts; raises BadParameter for options that are only for that."""
    if options.calibrate is not None or options.token_ids is not None:
        return True
    for name in ("tokens", "window", "seed", "save_statistics"):
        if getattr(options, name) is not None:
            raise typer.BadParameter(f"--{name.replace('_', '-')} only applies with --calibrate FILE")
    return False


def _check_text(options: RunOptions) -> Rule:
    """Return the rule that converts with a text; raises BadParameter for options that it does not go with."""
    if options.calibrate is not None and options.token_ids is not None:
        raise typer.BadParameter("pass --calibrate FILE or --token-ids FILE, not both")
    if options.rule not in (None, "feedback"):
        raise typer.BadParameter(f"--calibrate converts by rule feedback: leave out --rule {options.rule}")
    if options.statistics is not None:
        raise typer.BadParameter("--calibrate makes its own statistics: leave out --statistics")
    if options.quantizer == "reference":
        raise typer.BadParameter("--calibrate converts by rule feedback: leave out --quantizer reference")
    return "feedback"


def check_kv_cache(layout: Layout | None, kv_cache: KvCache | None) -> None:
    """Raise BadParameter for an FP8 KV cache in a layout where vLLM does not read it for models with MLA attention."""
    if kv_cache is not None and layout == "compressed-tensors":
        raise typer.BadParameter(
            f"--kv-cache {kv_cache} (kv_cache in a recipe) has no effect in vLLM with the layout compressed-tensors. "
            f"Leave it out, and serve with `vllm serve --kv-cache-dtype {kv_cache}`"
        )


def _input_scales(gate_up: float | None, down: float | None) -> dict[str, float] | None:
    """Return the recipe's input_scale, if an option sets it."""
    if gate_up is None and down is None:
        return None
    first = 1.0 if gate_up is None else gate_up
    return {"gate_up": first, "down": first if down is None else down}
