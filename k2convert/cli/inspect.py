"""`inspect`: what a checkpoint or a statistics file holds, as tables for people and plain data for --json."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np

from k2convert.calibration.channels import MIN_TOKENS, Calibration
from k2convert.calibration.statistics import LayerStatistics, open_statistics
from k2convert.checkpoint.names import CONFIG_NAME, SHARD_SUFFIX
from k2convert.cli.console import command, print_line, print_next, print_note, print_table, show
from k2convert.cli.verbs import InspectOptions
from k2convert.errors import CalibrationError, counted, format_bytes, shortened
from k2convert.hub.client import Hub
from k2convert.job.opening import inspect_source
from k2convert.plan.inspection import Inspection


def inspect(options: InspectOptions) -> None:
    """Show a checkpoint, from its headers, or a statistics file."""
    source = options.source
    if Path(source).is_file():
        path = Path(source)
        try:
            found = open_statistics(path)
        except CalibrationError:
            if path.suffix in (".json", SHARD_SUFFIX) and (path.parent / CONFIG_NAME).is_file():
                advice = f"To inspect that, pass the folder: {path.parent}"
                raise CalibrationError(f"{path}: not a statistics file, but a file of a checkpoint. {advice}") from None
            raise
        used = Calibration(found, weighted=True, smoothing=True)
        document = {
            "file": str(found.path),
            "digest": found.digest,
            "source_headers": found.source_headers,
            "texts": [{"name": name, "blake3": digest} for name, digest in found.texts],
            "tokens": found.tokens,
            "window": found.window,
            "windows": found.windows,
            "dropped_windows": found.dropped,
            "seed": found.seed,
            "versions": found.versions,
            "exponents_digest": used.exponents_digest(),
            "layers": {str(n): _layer_document(found.layer(n), used.fallback_experts(n)) for n in found.layers},
        }
        show(document, partial(_show_statistics, document))
        print_next(command("k2convert", "run", "SOURCE", "DEST", "--statistics", path))
        return
    found = inspect_source(source, hub=Hub(notify=print_note))
    show(asdict(found), partial(_show_inspection, found))
    if found.recipe is not None:
        print_next(command("k2convert", "run", source, "DEST", "--dry-run"))
    elif found.nvfp4_projections:
        print_next(command("k2convert", "validate", source))


def _show_inspection(found: Inspection) -> None:
    layers = found.layers
    print_line(f"{found.folder}: {found.family} ({', '.join(found.architectures)}, model_type {found.model_type})")
    print_line(
        f"{layers['total']} layers ({layers['dense']} dense, {layers['moe']} MoE), {found.experts_per_layer} experts "
        f"per MoE layer, hidden {found.hidden_size}, expert width {found.moe_intermediate_size}"
    )
    if (conversion := found.conversion) is not None:
        print_line(_conversion_line(conversion))
    counts = {"INT4": found.int4_projections, "MXFP4": found.mxfp4_projections, "NVFP4": found.nvfp4_projections}
    projections = " and ".join(f"{count:,} {form}" for form, count in counts.items() if count) or "no 4-bit"
    print_line(
        f"{counted(found.num_shards, 'shard')}, {counted(found.num_tensors, 'tensor')}, {found.tensor_bytes:,} bytes "
        f"({format_bytes(found.tensor_bytes)}), {projections} projections"
    )
    quantization = found.quantization or {}
    rest = ", ".join(f"{key} {value}" for key, value in quantization.items() if key != "where")
    print_line(
        f"quantization_config in {quantization['where']}: {rest}" if quantization else "quantization_config: none"
    )
    rows = [
        (h.role, h.form, f"{h.num_tensors:,}", f"{h.num_weights:,}", format_bytes(h.num_bytes)) for h in found.holdings
    ]
    print_table("contents", ("role", "form", "tensors", "weights", "bytes"), rows)
    for oddity in found.oddities:
        print_line(f"note: {oddity}")
    if found.recipe is not None:
        print_line(f"recipe by default: {found.recipe}")


def _conversion_line(conversion: Mapping[str, Any]) -> str:
    if conversion["target"] != "nvfp4":
        return f"converted to {conversion['target']} by k2convert"
    line = f"converted by rule {conversion['rule']}, layout {conversion['layout']}, {conversion['activations']}"
    if (error := conversion.get("relative_mse")) is None:
        return line
    compared = conversion.get("achieved_to_max")
    more = ""
    if compared is not None:
        more = f", {compared:.3f} of that of rule max"
    return f"{line}: weight error {error:.5f}{more}"


def _layer_document(layer: LayerStatistics, fallback: tuple[int, ...]) -> dict[str, Any]:
    exponents, counts = np.unique(layer.smoothing_exponents, return_counts=True)
    shared = layer.shared_down_amax
    cache = None
    if layer.kv_amax is not None:
        names = ("amax", "subnormal_share", "saturated_share")
        cache = {name: getattr(layer, f"kv_{name}").tolist() for name in names}
    return {
        "dense": layer.is_dense,
        "tokens": layer.tokens.tolist(),
        "fallback": list(fallback),
        "exponents": {str(e): count for e, count in zip(exponents.tolist(), counts.tolist(), strict=True)},
        "gate_up_amax": float(layer.gate_up_amax[0]),
        "down_amax": layer.down_amax.tolist(),
        "shared_down_amax": None if shared is None else float(shared[0]),
        "saliency": layer.saliency.tolist(),
        "router_weight": layer.router_weight.tolist(),
        "without_imatrix": list(layer.without_imatrix),
        "kv_cache": cache,
    }


def _show_statistics(document: dict[str, Any]) -> None:
    print_line(
        f"{document['file']}: statistics of {document['tokens']:,} tokens in windows of {document['window']:,}, "
        f"seed {document['seed']}"
    )
    for text in document["texts"]:
        print_line(f"text: {shortened(text['name'])} (blake3 {text['blake3'][:16]})")
    if dropped := document["dropped_windows"]:
        print_line(f"{dropped:,} of {document['windows']:,} windows were dropped: their hidden states are not finite")
    print_line(f"of the source with headers {document['source_headers'][:16]}; blake3 {document['digest'][:16]}")
    versions = (f"{shortened(name)} {shortened(version)}" for name, version in document["versions"].items())
    print_line(f"made with {', '.join(versions)}")
    rows = [_row(number, layer) for number, layer in document["layers"].items()]
    few = f"below {MIN_TOKENS}"
    columns = ("layer", "tokens: least", "median", "most", few, "scaled", "max x", "max z", "max kv")
    experts = max(len(layer["tokens"]) for layer in document["layers"].values())
    print_table(f"{len(rows)} layers, {experts:,} experts per MoE layer", columns, rows)
    print_line(
        f"{few}: experts with fewer than {MIN_TOKENS} tokens; their importance in down is drawn toward an even one"
    )
    print_line("scaled: channels that smoothing multiplies by a power of two")
    print_line("max x: the largest input of gate and up. max z: the largest input of down")
    caches = {number: layer["kv_cache"] for number, layer in document["layers"].items() if layer["kv_cache"]}
    if caches:
        print_line("max kv: the largest value in a KV cache: of MLA's latent and rotary key, or of keys and values")
        largest = max(value for found in caches.values() for value in found["amax"])
        saturated = [number for number, found in caches.items() if max(found["saturated_share"]) > 0]
        if saturated:
            layers = f"values of {counted(len(saturated), 'layer')} ({', '.join(saturated)}): the largest is"
            advice = ". Do not declare it."
        else:
            layers = "nothing: the largest value is"
            advice = "."
        print_line(f"An FP8 KV cache with scale 1 saturates {layers} {largest:.3g}, E4M3 ends at 448{advice}")
        share, number = max((max(found["subnormal_share"]), number) for number, found in caches.items())
        most = f"at most {100 * share:.1f} % of a part (layer {number})"
        print_line(f"Below its normal range, 2^-6, values lose precision: {most}.")
    without = [number for number, layer in document["layers"].items() if layer["without_imatrix"]]
    if without:
        print_line(
            f"rule imatrix is not used in {counted(len(without), 'layer')}, at least in part: on tokens that were kept "
            f"out, rule mse lost less (layers {', '.join(without)})"
        )


def _row(number: str, layer: dict[str, Any]) -> tuple[str, ...]:
    tokens: list[int] = layer["tokens"]
    scaled = sum(count for exponent, count in layer["exponents"].items() if exponent != "0")
    largest = max(*layer["down_amax"], layer["shared_down_amax"] or 0.0)
    return (
        f"{number} dense" if layer["dense"] else number,
        f"{min(tokens):,}",
        f"{median_low(tokens):,}",
        f"{max(tokens):,}",
        f"{len(layer['fallback']):,}",
        f"{scaled:,}",
        f"{layer['gate_up_amax']:.3g}",
        f"{largest:.3g}",
        "" if layer["kv_cache"] is None else " ".join(f"{value:.3g}" for value in layer["kv_cache"]["amax"]),
    )
