"""The repository's README: what was converted, what it lost, how to serve it, where it comes from.

Everything in it follows from the ledger, the config and the source's own card, so a published folder and a streamed
job give the same page. Built and checked by huggingface_hub's ModelCard.
"""

import math
from dataclasses import dataclass
from typing import Any, cast

from k2convert.hub.source_card import SourceCard, _carried_over
from k2convert.quantize.metrics.weight_metrics import WeightMetrics

PICTURES = ("report.png", "report.svg")
_TP_SIZES = (8, 4, 2)
_ENGINE_NAMES = {"modelopt": "`modelopt`", "compressed-tensors": "`compressed-tensors` (nvfp4-pack-quantized)"}
_ROLE_NAMES = {
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "dense_mlp": "dense MLP of the first layers",
    "total": "all converted weights",
}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What the card is made from; `ledger` and `config` are the documents published beside it."""

    repo: str
    base_model: str | None
    ledger: dict[str, Any]
    config: dict[str, Any]
    source: SourceCard
    picture: str | None = None

    @property
    def recipe(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.ledger["recipe"])

    @property
    def is_w4a4(self) -> bool:
        return self.recipe["activations"] == "w4a4"

    @property
    def totals(self) -> dict[str, WeightMetrics]:
        found = cast(dict[str, dict[str, object]], self.ledger["totals"])
        return {role: WeightMetrics.from_dict(metrics) for role, metrics in found.items()}

    @property
    def tensor_parallel(self) -> int:
        """The largest usual size at which every engine's kernels take the experts without padding."""
        text = cast(dict[str, Any], self.config.get("text_config") or self.config)
        width = int(text.get("moe_intermediate_size") or 0)
        return next((size for size in _TP_SIZES if width and width % (64 * size) == 0), 1)


def build_card(facts: CardFacts) -> str:
    """The whole README.md, front matter first."""
    from huggingface_hub import ModelCard

    sections = [_title(facts), _conversion(facts), _error(facts), _serving(facts), _hardware(facts), _provenance(facts)]
    body = "\n\n".join(section.strip() for section in sections)
    return str(ModelCard(f"---\n{_front_matter(facts)}\n---\n\n{body}\n"))


def _front_matter(facts: CardFacts) -> str:
    tags = ["nvfp4", "fp4", "kimi-k2", facts.recipe["layout"], "vllm", "sglang", "k2convert"]
    if facts.recipe["layout"] == "modelopt" and facts.is_w4a4:
        tags.insert(-1, "tensorrt-llm")
    return _carried_over(
        facts.source,
        base_model=facts.base_model,
        base_model_relation="quantized" if facts.base_model else None,
        library_name=facts.source.library_name or "transformers",
        pipeline_tag=facts.source.pipeline_tag or ("image-text-to-text" if _has_vision(facts) else "text-generation"),
        tags=tags,
    )


def _has_vision(facts: CardFacts) -> bool:
    return "text_config" in facts.config


def _base(facts: CardFacts) -> str:
    return f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else "a Kimi K2 model"


def _title(facts: CardFacts) -> str:
    name = facts.repo.partition("/")[2]
    width = "W4A4: 4-bit weights and activations" if facts.is_w4a4 else "W4A16: 4-bit weights, 16-bit activations"
    lines = [f"# {name}", f"{_base(facts)} with its {_list(facts.recipe['roles'])} converted to NVFP4 ({width})."]
    if facts.picture is not None:
        lines.append(f"![Error of the converted weights]({facts.picture})")
    return "\n\n".join(lines)


def _conversion(facts: CardFacts) -> str:
    recipe = facts.recipe
    roles = cast(list[str], recipe["roles"])
    kept = ["attention", "router", "embeddings and output head"]
    kept += [_ROLE_NAMES[role] for role in ("shared_experts", "dense_mlp") if role not in roles]
    kept += ["vision tower and projector"] if _has_vision(facts) else []
    rule = (
        "`optimal`: for every block of 16 weights the E4M3 scale with the least squared error against the "
        "source's exact values, found by search, with no BF16 step between"
        if recipe["rule"] == "optimal"
        else "`plain`: dequantised to BF16, then quantised by amax, bit for bit as ModelOpt does by default"
    )
    cache = "\n- KV cache: declared FP8, scale 1.0" if recipe.get("kv_cache") else ""
    inputs = cast(dict[str, Any], recipe.get("input_scale") or {})
    scales = (
        f"\n- Activation scales: constant, {inputs.get('gate_up', 1.0):g} for gate and up, "
        f"{inputs.get('down', 1.0):g} for down; no calibration data were used"
        if facts.is_w4a4
        else ""
    )
    return f"""
## What was converted

- To NVFP4 (E2M1 codes, one E4M3 scale for 16 weights, one power-of-two scale a tensor): {_list(roles)}
- Kept byte for byte: {", ".join(kept)}
- Rule: {rule}{scales}{cache}
- Tensor names and config: {_ENGINE_NAMES[recipe["layout"]]}
""".replace("one power-of-two scale a tensor", _global_scale_words(recipe))


def _global_scale_words(recipe: dict[str, Any]) -> str:
    return "one power-of-two scale a tensor" if recipe["rule"] == "optimal" else "one FP32 scale a tensor"


def _list(roles: list[str]) -> str:
    return ", ".join(_ROLE_NAMES.get(role, role) for role in roles)


def _error(facts: CardFacts) -> str:
    rows = [
        "| weights | number | SQNR | relative MSE | usual rule (`plain`) | bound | INT4 codes recoverable |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for role, metrics in facts.totals.items():
        if role == "total" and len(facts.totals) == 2:
            continue
        plain = _shifted(metrics.sqnr_db, metrics.achieved_to_plain)
        bound = _shifted(metrics.sqnr_db, metrics.achieved_to_bound)
        codes = (
            f"{metrics.recoverable_codes / metrics.num_codes:.2%}"
            if metrics.num_codes and metrics.recoverable_codes is not None
            else ""
        )
        rows.append(
            f"| {_ROLE_NAMES.get(role, role)} | {metrics.num_weights:,} | {_decibels(metrics.sqnr_db)} | "
            f"{metrics.relative_mse:.5f} | {plain} | {bound} | {codes} |"
        )
    total = facts.totals.get("total")
    ratio = (
        f"On sampled blocks the squared error is {metrics_ratio(total.achieved_to_plain)} times that of `plain` and "
        f"{metrics_ratio(total.achieved_to_bound)} times the bound, which no choice of scales can go below. "
        if total is not None
        else ""
    )
    return f"""
## What it lost

Error of the stored weights against the exact values of the source:

{chr(10).join(rows)}

{ratio}`plain` dequantises to BF16 and takes each block's scale from its largest weight.

**This is not lossless.** INT4 has sixteen evenly spaced levels, E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6:
5 and 7 lie between them, so blocks that hold them change. The figures above are of weights
alone.{_activation_words(facts)}
"""


def _activation_words(facts: CardFacts) -> str:
    if not facts.is_w4a4:
        return ""
    return " Rounding activations to 4 bits at run time adds error of its own, usually more than this conversion."


def metrics_ratio(value: float) -> str:
    """A ratio of errors as text."""
    return f"{value:.3f}" if math.isfinite(value) else "not measurably many"


def _shifted(sqnr_db: float, ratio: float) -> str:
    """The SQNR that another rule has, whose error is 1/ratio times ours."""
    if not (math.isfinite(sqnr_db) and math.isfinite(ratio)) or ratio <= 0:
        return ""
    return f"{sqnr_db + 10 * math.log10(ratio):.2f} dB"


def _decibels(value: float) -> str:
    return f"{value:.2f} dB" if math.isfinite(value) else "exact"


def _serving(facts: CardFacts) -> str:
    size, repo = facts.tensor_parallel, facts.repo
    blocks = [
        f"vLLM:\n\n```bash\nvllm serve {repo} \\\n    --tensor-parallel-size {size} --trust-remote-code \\\n"
        "    --enable-auto-tool-choice --tool-call-parser kimi_k2 --reasoning-parser kimi_k2\n```",
        f"SGLang:\n\n```bash\npython3 -m sglang.launch_server --model-path {repo} \\\n    --tp {size} "
        "--trust-remote-code \\\n    --tool-call-parser kimi_k2 --reasoning-parser kimi_k2\n```",
    ]
    if facts.recipe["layout"] == "modelopt" and facts.is_w4a4:
        blocks.append(f"TensorRT-LLM:\n\n```bash\ntrtllm-serve {repo} --tp_size {size} --trust_remote_code\n```")
    elif facts.is_w4a4:
        blocks.append("TensorRT-LLM: only recent releases read this layout; the `modelopt` layout suits all of them.")
    else:
        blocks.append("TensorRT-LLM: support for weight-only NVFP4 (`W4A16_NVFP4`) depends on the release.")
    return "## Serving\n\nThe quantisation is read from `config.json`; no option names it.\n\n" + "\n\n".join(blocks)


def _hardware(facts: CardFacts) -> str:
    total = sum(int(shard["bytes"]) for shard in cast(dict[str, dict[str, Any]], facts.ledger["shards"]).values())
    size = f"{total / 1e9:,.0f} GB" if total >= 1e9 else f"{total / 1e6:,.1f} MB"
    native = (
        "- Blackwell (B200, B300, GB200, RTX PRO 6000) multiplies NVFP4 weights and activations in hardware."
        if facts.is_w4a4
        else "- Weight-only: activations stay in 16 bits on every GPU, Blackwell included."
    )
    return f"""
## Hardware

{native}
- Hopper and older run it through Marlin kernels as weight-only: activations stay in 16 bits there.
- It is not smaller than the INT4 source: both take 4.5 bits a converted weight. All shards
  together have {size}; leave room for the KV cache.
"""


def _provenance(facts: CardFacts) -> str:
    ledger, recipe = facts.ledger, facts.recipe
    source = cast(dict[str, Any], ledger["source"])
    commit = f"commit `{source['revision']}`" if source.get("revision") else "a local copy, identified by its headers"
    versions = ", ".join(f"{name} {version}" for name, version in cast(dict[str, str], ledger["versions"]).items())
    return f"""
## Provenance

- Source: {_base(facts)}, {commit}
- Converter: k2convert {ledger["k2convert"]} ({versions}), recipe `{recipe["name"]}`
- `k2convert.json` holds the whole recipe, the digests of the source's headers, the blake3 of every shard, and all sums.
"""
