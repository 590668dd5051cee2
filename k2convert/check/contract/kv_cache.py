"""Rule 15: what the config declares of a KV cache, and the scales that are there for it.

Read in vLLM and SGLang (`BaseKVCacheMethod`): without any scale they use 1.0, without a v scale the k scale for both. A
v scale alone stops them.
"""

from collections import defaultdict

from k2convert.check.contract.result import Result
from k2convert.check.results import Findings
from k2convert.errors import counted, quoted
from k2convert.models.config import FP8, KV_SCALES, kv_cache_form
from k2convert.models.names import Role


def check_kv_cache(result: Result) -> Findings:
    """Rule 15. An FP8 cache changes answers at long context, so the recipe must ask for it. Its default scale is 1."""
    found = Findings(15)
    scheme = result.declared.get("kv_cache_scheme")
    recipe = result.recipe
    place = "quantization_config.kv_cache_scheme"
    if recipe is not None and (recipe.kv_cache is not None) != (scheme is not None):
        asked = "does not ask for one"
        if recipe.kv_cache is not None:
            asked = "asks for one"
        found.error(place, f"{quoted(scheme)}, but the recipe {asked}")
    form = kv_cache_form(result.declared)
    if form not in ("", FP8):
        result.habit(found)(place, f"{form}: only scales of a static FP8 cache are checked here")
        return found
    scales = _kv_scales(result)
    attention = [m for m in result.modules.values() if m.parts.role is Role.ATTENTION]
    latent = {m.parts.layer for m in attention if m.name.endswith("kv_b_proj")}  # linear attention has no cache
    layers = (latent or {m.parts.layer for m in attention}) - scales.keys()
    if scales:
        found.note = f"{counted(len(scales), 'layer')} with scales of an FP8 cache"
    if form and not result.names.vllm_reads_kv_cache:
        found.warn(place, "no effect in vLLM 0.32 and 0.33: serve with --kv-cache-dtype fp8")
    elif form and layers:
        problem = "FP8 cache without k and v scales: engines use 1.0"
        found.warn(place, f"{problem} in {counted(len(layers), 'layer')}" if scales else problem)
    elif not form and scales:
        found.warn(place, "missing, so the scales have no effect: serve with --kv-cache-dtype fp8")
    for layer, kinds in scales.items():
        if form and kinds == {"v"}:
            found.error(f"layer {layer}", "has a v scale but no k scale: vLLM and SGLang refuse it")
        elif kinds == {"k"}:
            found.warn(f"layer {layer}", "has a k scale but no v scale: vLLM and SGLang use it for both")
    return found


def _kv_scales(result: Result) -> dict[int | None, set[str]]:
    """Return of what each layer has scales: keys ("k"), values ("v")."""
    scales: dict[int | None, set[str]] = defaultdict(set)
    for module in result.modules.values():
        for parameter in module.parameters.keys() & set(KV_SCALES):
            name = module.name.rpartition(".")[2] if parameter == "output_scale" else parameter
            kind = name.partition("_")[0]
            scales[module.parts.layer] |= {kind} if kind in ("k", "v") else {"k", "v"}
    return dict(sorted(scales.items(), key=str))
