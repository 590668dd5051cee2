"""What a result needs, in short: for the report and the model card."""

from dataclasses import dataclass
from typing import Final

from k2convert.fit.memory import KV_BYTES, OVERHEAD_BYTES, UTILIZATION, Settings
from k2convert.fit.search import Holder, find_holders, fp8_and_bf16_tokens
from k2convert.fit.subject import Subject

NEEDS_COLUMNS: Final = ("GPUs", "layout", "weights on each", "KV tokens, FP8", "KV tokens, BF16")


@dataclass(frozen=True, slots=True)
class Needs:
    """A sentence of what the weights and a token take, and a row for each kind of GPU that holds it."""

    summary: str
    rows: tuple[tuple[str, ...], ...]
    note: str


def state_needs(subject: Subject) -> Needs:
    """Say what a model needs, and the fewest GPUs of each kind that hold it with a request of 8,192 tokens in BF16."""
    settings = Settings(kv="bf16")
    fewest: dict[str, Holder] = {}
    for holder in find_holders(subject.weights, subject.shape, settings=settings):
        fewest.setdefault(holder.gpu.name, holder)
    fp8, bf16 = (f"{subject.kv_values * KV_BYTES[kv]:,}" for kv in ("fp8", "bf16"))
    return Needs(
        summary=(
            f"Weights: {gigabytes(subject.weights.num_bytes)}. KV cache: {fp8} bytes per token in FP8, {bf16} in BF16; "
            "tensor parallelism does not divide it, decode context parallelism does."
        ),
        rows=tuple(_row(subject, holder) for holder in fewest.values()),
        note=(
            f"Computed from the headers, with {UTILIZATION:.0%} of each GPU's memory used and "
            f"{gigabytes(OVERHEAD_BYTES)} assumed for activations, CUDA graphs and NCCL. `k2convert fit` computes "
            "other GPUs, layouts and lengths."
        ),
    )


def _row(subject: Subject, holder: Holder) -> tuple[str, ...]:
    fit = holder.fit
    tokens = fp8_and_bf16_tokens(subject.weights, subject.shape, holder, settings=Settings())
    return (
        f"{fit.layout.num_gpus} x {holder.gpu.title}",
        str(fit.layout),
        gigabytes(fit.weight_bytes),
        *(f"{count:,}" for count in tokens),
    )


def gigabytes(num_bytes: int) -> str:
    """Format bytes as GB, with the digits that matter; MB below one."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
