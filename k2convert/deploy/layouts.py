"""Ways in which GPUs share the work of a model, and which layouts are possible.

`tensor` GPUs hold each layer together, `pipeline` such groups hold the layers one after another. Experts are split
inside by tensor parallelism, or whole ones are distributed over the GPUs (`expert`). An impossible layout is an error
that names the number it does not divide and the nearest that works.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

from k2convert.choices import FP8_BLOCK
from k2convert.deploy.model import ModelShape
from k2convert.errors import FitError
from k2convert.models import cuts_no_block
from k2convert.models.names import tensor_sizes

WIDTH_ALIGNMENT: Final = 64
"""Columns of an expert on one GPU: TensorRT-LLM's kernels need multiples of 64, the largest alignment of all."""

_MOST_GPUS: Final = 1024
_MAX_NODE: Final = 8  # GPUs of tensor parallelism if the caller does not say: those of one machine


@dataclass(frozen=True, slots=True)
class Parallelism:
    """A layout. `data_attention`: each of the `tensor` GPUs has its own requests.

    `expert` is 1 (experts are split like other weights) or the number of GPUs that whole experts are distributed over.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data_attention: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        first = "DP" if self.data_attention else "TP"
        sizes = {first: self.tensor, "EP": self.expert, "PP": self.pipeline}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or f"{first}1"


def check_layout(layout: Parallelism, shape: ModelShape) -> None:
    """Raise FitError if the model cannot be laid out so, naming the divisor and the nearest numbers that work."""
    if not layout.data_attention:
        allowed = _tensor_sizes(shape)
        sizes = ""
        if shape.tensor_sizes:
            sizes = f" and be one of {', '.join(map(str, allowed))}"
        reason = f"it must divide the {shape.num_heads} attention heads{sizes}"
        if not cuts_no_block(shape.fp8_sizes, layout.tensor):
            reason = f"it would cut FP8 blocks of {FP8_BLOCK} x {FP8_BLOCK} weights of attention"
        _check("tp", layout.tensor, allowed, reason)
    choices = _expert_sizes(layout.tensor, shape)
    if layout.expert not in choices:  # experts are distributed evenly, and kernels accept their pieces
        if layout.tensor % layout.expert:
            reason = f"it must divide the {layout.tensor} GPUs that hold a layer"
        elif shape.num_experts % layout.expert:
            reason = f"it must divide the {shape.num_experts} experts"
        else:
            reason = (
                f"{layout.tensor // layout.expert} GPUs would split an expert, but pieces of its {shape.expert_width} "
                f"columns must be multiples of {WIDTH_ALIGNMENT}"
            )
        nearest = _nearest("ep", layout.expert, choices)
        if not choices:
            sizes = range(1, _MOST_GPUS + 1) if layout.data_attention else _tensor_sizes(shape)
            nearest = _nearest("tp", layout.tensor, [n for n in sizes if _expert_sizes(n, shape)])
        requested = f"--ep {layout.expert}" if layout.expert > 1 else f"--tp {layout.tensor} without --ep"
        raise FitError(f"{requested}: {reason}. Nearest: {nearest}.")
    _check("pp", layout.pipeline, range(1, shape.num_layers + 1), f"stages hold whole layers of {shape.num_layers}")


def _tensor_sizes(shape: ModelShape) -> list[int]:
    sizes = tensor_sizes(_divisors(shape.num_heads), shape.num_heads, shape.tensor_sizes)
    return [n for n in sizes if cuts_no_block(shape.fp8_sizes, n)]


def _expert_sizes(tensor: int, shape: ModelShape) -> list[int]:
    """Return what --ep may be on that many GPUs."""
    widths = _widths(shape)
    return [n for n in _divisors(tensor) if shape.num_experts % n == 0 and tensor // n in widths]


def _widths(shape: ModelShape) -> list[int]:
    """Return how many GPUs may split an expert; one always may hold it whole."""
    return [n for n in _divisors(shape.expert_width) if shape.expert_width % (n * WIDTH_ALIGNMENT) == 0] or [1]


def _check(option: str, value: int, allowed: Sequence[int], reason: str) -> None:
    if value not in allowed:
        raise FitError(f"--{option} {value}: {reason}. Nearest: {_nearest(option, value, allowed)}.")


def _nearest(option: str, value: int, choices: Sequence[int]) -> str:
    below = [n for n in choices if n < value][-1:]
    above = [n for n in choices if n > value][:1]
    return " or ".join(f"--{option} {n}" for n in (*below, *above))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def complete_layout(
    count: int,
    shape: ModelShape,
    *,
    tensor: int | None = None,
    expert: int | None = None,
    pipeline: int | None = None,
    data_attention: bool = False,
) -> Parallelism:
    """Return the layout of `count` GPUs with what the caller chose; raises FitError if there is none.

    What is open: as much tensor parallelism as one machine has, and pipeline stages over machines. DP attention gives
    whole experts to each GPU; else experts are split.
    """
    if tensor is None:
        tensor = _open_tensor(count, shape, pipeline, data_attention)
    if pipeline is None and count % tensor == 0:
        pipeline = count // tensor
    if expert is None:
        expert = tensor if data_attention else 1
    layout = Parallelism(tensor, expert, pipeline or 1, data_attention)
    check_layout(layout, shape)
    if layout.num_gpus != count:
        usual = _open_tensor(count, shape, None, data_attention=False)
        suggested = Parallelism(tensor=usual, pipeline=count // usual)
        raise FitError(
            f"--tp {layout.tensor} and --pp {layout.pipeline} use {layout.num_gpus} GPUs, not --count {count}. "
            f"Nearest: --count {layout.num_gpus}, or leave out --tp and --pp: {suggested}."
        )
    return layout


def _open_tensor(count: int, shape: ModelShape, pipeline: int | None, data_attention: bool) -> int:
    if pipeline is not None:
        return max(count // pipeline, 1)
    if data_attention:
        return count
    widths = _widths(shape)
    sizes = [n for n in _tensor_sizes(shape) if count % n == 0 and n <= _MAX_NODE and n in widths]
    return max(sizes, default=1)


def possible_layouts(count: int, shape: ModelShape) -> Iterator[Parallelism]:
    """Yield every layout of `count` GPUs, the usual one first. DP attention, which repeats weights, is left out."""
    usual = _open_tensor(count, shape, None, data_attention=False)
    sizes = [n for n in _tensor_sizes(shape) if count % n == 0 and count // n <= shape.num_layers]
    for tensor in sorted(sizes, key=lambda n: (n != usual, -n)):
        for expert in _expert_sizes(tensor, shape):
            yield Parallelism(tensor, expert, count // tensor)


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """Return the layers of each pipeline stage as vLLM 0.33 assigns them (vllm/distributed/utils.py).

    What is left after an even split goes to the stages before the last, from the back.
    """
    counts = [num_layers // num_stages] * num_stages
    for i in range(2, num_layers % num_stages + 2):
        counts[-i] += 1
    return [range(*bounds) for bounds in pairwise(accumulate(counts, initial=0))]
