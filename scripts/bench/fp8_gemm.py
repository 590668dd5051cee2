"""Times one layer's BF16 products of Kimi K2 against FP8 with a scale for each row and token, on a GPU.

A step of decoding multiplies 1 to 8 tokens by each weight, and reads the weights from memory. So copies of a weight
take turns that together are larger than any cache. FP8 includes rounding the input. It prints Markdown: microseconds of
the five products, and their sum.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

LAYERS = {
    "q_a + kv_a": (2112, 7168, ""),  # every GPU has all of it
    "q_b": (12288, 1536, "rows"),
    "o": (7168, 8192, "columns"),
    "shared gate + up": (4096, 7168, "rows"),
    "shared down": (7168, 2048, "columns"),
}
"""Rows and columns of K2's weights, and what tensor parallelism cuts."""
SIZES = (1, 8)
TOKENS = (1, 2, 4, 8)
COLD_BYTES = 512 << 20
ROUNDS = 20
E4M3_MAX = 448.0


def shape(layer: str, size: int) -> tuple[int, int]:
    """Return rows and columns of a weight on one of `size` GPUs."""
    rows, columns, cut = LAYERS[layer]
    return rows // (size if cut == "rows" else 1), columns // (size if cut == "columns" else 1)


def to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return E4M3 codes of rows [N, K], and their scales f32 [N, 1]."""
    scales = values.abs().amax(dim=1, keepdim=True).float() / E4M3_MAX
    return (values.float() / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def bf16_product(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    """Return the product with a random BF16 weight [N, K]."""
    weight = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
    return lambda x: torch.nn.functional.linear(x, weight)


def fp8_product(rows: int, columns: int) -> Callable[[Tensor], Tensor]:
    """Return the product with a random FP8 weight [N, K], with the rounding of its input."""
    codes, scales = to_fp8(torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda"))
    round_input = torch.compile(to_fp8, dynamic=True)

    def multiply(x: Tensor) -> Tensor:
        inputs, of_inputs = round_input(x)
        return torch._scaled_mm(inputs, codes.T, of_inputs, scales.T, out_dtype=torch.bfloat16)

    return multiply


def microseconds(products: list[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    """Return the time of one product, by a graph of all copies that is replayed."""
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(ROUNDS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / (ROUNDS * len(products))


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("| TP | tokens | layer | BF16, us | FP8, us | ratio |\n|---:|---:|---|---:|---:|---:|")
    for size in SIZES:
        times: dict[tuple[int, str], tuple[float, float]] = {}
        for layer in LAYERS:
            rows, columns = shape(layer, size)
            copies = max(2, COLD_BYTES // (2 * rows * columns))
            makes = (bf16_product, fp8_product)
            both = [[make(rows, columns) for _ in range(copies)] for make in makes]
            for tokens in TOKENS:
                x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
                bf16, fp8 = (microseconds(products, x) for products in both)
                times[tokens, layer] = bf16, fp8
        for tokens in TOKENS:
            each = [times[tokens, layer] for layer in LAYERS]
            times[tokens, "sum"] = sum(bf16 for bf16, _ in each), sum(fp8 for _, fp8 in each)
            for layer in (*LAYERS, "sum"):
                bf16, fp8 = times[tokens, layer]
                print(f"| {size} | {tokens} | {layer} | {bf16:.1f} | {fp8:.1f} | {bf16 / fp8:.2f} |")


if __name__ == "__main__":
    main()
