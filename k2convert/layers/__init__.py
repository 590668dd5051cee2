"""Reference layers: whether a converted MoE layer still computes what the INT4 layer computed."""

from k2convert.layers.check import check_layers, moe_layers
from k2convert.layers.result import LayerBudget, LayerResult, LayersReport, Variant, VariantError

__all__ = ["LayerBudget", "LayerResult", "LayersReport", "Variant", "VariantError", "check_layers", "moe_layers"]
