"""The model's forward pass, one decoder layer at a time, straight from the checkpoint.

A layer is run on a chunk of whole windows: attention window by window, then the MLP expert by expert. A weight stays
packed until its tokens are computed, and only experts that a token chose are read, so memory does not grow with the
number of experts. A dense MLP is read once and kept. Windows, and pieces of an expert's tokens, are what workers take,
and outputs are added in the order of the experts: the same bytes with any number of workers. Everything is FP32; on
CUDA devices matrix products use TF32, but the router does not.

An observer sees the inside of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from k2convert.checkpoint.index import Checkpoint
from k2convert.errors import CalibrationError
from k2convert.forward.attention import Attention, build_attention
from k2convert.forward.moe import (
    Mlp,
    MlpTokens,
    Router,
    Routing,
    block_mlps,
    one_torch_thread,
    read_activation,
    read_latent,
    read_mlp,
    read_router,
    read_router_config,
    run_in_order,
    shared_mlp,
)
from k2convert.forward.residual import ResidualAttention, read_residual_config
from k2convert.forward.weights import WeightReader
from k2convert.models import detect_family, read_architecture
from k2convert.quantize.gptq.device_kernel import kernel_for
from k2convert.quantize.gptq.hessian import TILE, damp_hessian
from k2convert.quantize.gptq.rounding import round_gptq

PIECE_TOKENS: Final = 2048
DENSE_PIECE_TOKENS: Final = 1024
CUDA_PIECE_TOKENS: Final = 32768
"""The most tokens of one MLP computed at once."""


ReadMlp = Callable[[str, str], Callable[[Tensor], Tensor]]
"""Reads an MLP by its module onto a device."""


class BlockObserver(Protocol):
    """Sees what happens in a layer's MLP. All calls come from the thread that called `run`, in a fixed order:
    `block`, `expert` by expert number (only experts that a token chose), then the shared experts, `output`.

    A subclass overrides some: the others do nothing. Tensors are on the layer's first device and may be kept, but not
    changed.
    """

    def block(self, x_TK: Tensor, routing: Routing | None) -> None:
        """The input f32 [T, K] of the MLP: the output of post_attention_layernorm. No routing: a dense MLP."""

    def expert(self, mlp: MlpTokens) -> None:
        """One MLP is computed on some tokens of x. A dense MLP is expert 0, shared experts have no number.

        An MLP with many tokens is reported in several calls, one after the other.
        """

    def output(self, h_TK: Tensor) -> None:
        """The hidden states f32 [T, K] after the layer, residual included."""


def embed(reader: WeightReader, ids: Tensor) -> Tensor:
    """Return the embeddings f32 [W, T, K] of token ids int64 [W, T]; reads only their rows.

    CalibrationError if an id is outside the vocabulary.
    """
    name = f"{detect_family(reader.checkpoint).prefix}embed_tokens.weight"
    vocabulary = reader.info(name).shape[0]
    rows = [int(row) for row in np.unique(ids.numpy())]
    if rows and not 0 <= (wrong := rows[0] if rows[0] < 0 else rows[-1]) < vocabulary:
        raise CalibrationError(
            f"token id {wrong} is outside the vocabulary of {vocabulary:,} tokens. "
            "Use token ids of this model's own tokenizer."
        )
    return reader.read_rows(name, rows).float()[torch.searchsorted(torch.tensor(rows), ids)]


def check_config(checkpoint: Checkpoint) -> None:
    """Refuse a config.json from which no layer can be computed (CheckpointError), before anything is."""
    architecture = read_architecture(checkpoint)
    family = detect_family(checkpoint)
    where = str(checkpoint.folder)
    read_activation(checkpoint, family)
    if family.attention(checkpoint.config, 0) == "rotary":
        build_attention(checkpoint.config, where=where)
    else:
        read_residual_config(checkpoint.config, where=where)
    if architecture.moe_layers:
        read_router_config(checkpoint.config, where=where, num_experts=architecture.num_experts)


class MlpBlock:
    """The MLPs of one layer, and its router if it has experts."""

    def __init__(
        self,
        reader: WeightReader,
        layer: int,
        devices: tuple[str, ...] = ("cpu",),
        workers: int = 1,
        *,
        fp4_inputs: bool = False,
    ) -> None:
        """Read the router of layer number `layer`; CheckpointError if it cannot be computed.

        Experts are assigned to `devices` in turn; the first one holds what is whole. With `fp4_inputs`, the inputs of
        NVFP4 weights are rounded to FP4.
        """
        checkpoint = reader.checkpoint
        architecture = read_architecture(checkpoint)
        read_activation(checkpoint, reader.family)
        is_moe = layer in architecture.moe_layers
        stem = reader.family.layer.format(layer=layer)
        self.mlp = reader.family.router.format(layer=layer).removesuffix(".gate") if is_moe else f"{stem}.mlp"
        self._reader = reader
        self._devices = devices
        self._workers = workers
        self._fp4_inputs = fp4_inputs
        self._piece_tokens = PIECE_TOKENS if devices[0] == "cpu" else CUDA_PIECE_TOKENS
        if not is_moe and devices[0] == "cpu":
            self._piece_tokens = DENSE_PIECE_TOKENS
        self._router: Router | None = read_router(reader, self.mlp, device=devices[0]) if is_moe else None
        self._latent = read_latent(reader, self.mlp, device=devices[0]) if is_moe else None
        self._dense: list[Mlp] = []

    @property
    def is_dense(self) -> bool:
        """Return whether all tokens take one MLP, so that windows do not share anything but its weights."""
        return self._router is None

    def route(self, x_TK: Tensor) -> Routing:
        """Return the experts that the input f32 [T, K] of the block chooses, which must have some."""
        assert self._router is not None
        return self._router(x_TK)

    def routed_input(self, x_TK: Tensor) -> Tensor:
        """Return what routed experts read of the input f32 [T, K] of the block: x itself, or its latent columns."""
        return x_TK if self._latent is None else self._in_pieces(self._latent.down.linear, x_TK)

    def routed_output(self, sum_TL: Tensor) -> Tensor:
        """Return what the sum of the routed experts' outputs adds to the hidden states, f32 [T, K]."""
        return sum_TL if self._latent is None else self._in_pieces(self._latent.leave, sum_TL.float())

    def _in_pieces(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        pieces = (x[start : start + self._piece_tokens] for start in range(0, x.shape[0], self._piece_tokens))
        with allowing_tf32(self._devices), run_in_order(compute, pieces, workers=self._workers) as results:
            return torch.cat(list(results))

    def outputs(
        self, x_TK: Tensor, mlps: list[MlpTokens], *, read: ReadMlp | None = None
    ) -> Generator[tuple[MlpTokens, Tensor]]:
        """Yield each piece in order, with its output f32 [t, K] on the first device.

        `read` reads an MLP in place of the layer's own; one in several versions gives [V, t, K].
        """
        read = read or self._read_mlp
        inputs = [x_TK.to(device) for device in self._devices]
        home = self._devices[0]

        def compute(assigned: tuple[int, MlpTokens]) -> tuple[MlpTokens, Tensor]:
            index, piece = assigned
            device = self._devices[index]
            mlp = self._dense[index] if self._dense else read(piece.module, device)
            return piece, mlp(inputs[index][piece.tokens.to(device)]).to(home)

        with allowing_tf32(self._devices), run_in_order(compute, self._cut(mlps), workers=self._workers) as results:
            yield from results

    @torch.no_grad()
    def shared_output(self, x_TK: Tensor) -> Tensor:
        """Return what the shared experts give for the input f32 [T, K] of the MLP; zeros if there are none."""
        total = torch.zeros_like(x_TK)
        with closing(self.outputs(x_TK, shared_mlp(self._reader, self.mlp, x_TK))) as outputs:
            for piece, output in outputs:
                total.index_add_(0, piece.tokens, output)
        return total

    def _read_mlp(self, module: str, device: str) -> Mlp:
        return read_mlp(self._reader, module, device=device, fp4_inputs=self._fp4_inputs)

    def _cut(self, mlps: list[MlpTokens]) -> Iterator[tuple[int, MlpTokens]]:
        """Yield the pieces of MLPs, each with the number of the device that it is assigned to."""
        number = 0
        for mlp in mlps:
            for start in range(0, mlp.tokens.shape[0], self._piece_tokens):
                piece = slice(start, start + self._piece_tokens)
                weights = None if mlp.weights is None else mlp.weights[piece]
                yield number % len(self._devices), replace(mlp, tokens=mlp.tokens[piece], weights=weights)
                number += 1


class DecoderLayer(MlpBlock):
    """One layer of the model; holds its attention and its norms too."""

    def __init__(
        self,
        reader: WeightReader,
        layer: int,
        devices: tuple[str, ...] = ("cpu",),
        workers: int = 1,
        *,
        fp4_inputs: bool = False,
        fp8_cache: bool = False,
    ) -> None:
        """Read all of layer number `layer` but its MLPs; CheckpointError if it cannot be computed.

        Windows are assigned to `devices` in turn. With `fp8_cache`, what a KV cache holds is rounded to E4M3.
        """
        super().__init__(reader, layer, devices, workers, fp4_inputs=fp4_inputs)
        kind = reader.family.attention(reader.checkpoint.config, layer)
        stem = reader.family.layer.format(layer=layer)
        self._attentions: list[Callable[..., tuple[Tensor, Tensor]]] = [
            Attention(reader, stem, device=on, fp8_cache=fp8_cache)
            if kind == "rotary"
            else ResidualAttention(reader, layer, kind, device=on, fp8_cache=fp8_cache)
            for on in devices
        ]

    @torch.no_grad()
    def run(self, hidden: Tensor, observer: BlockObserver | None = None, blocks: Sequence[Tensor] = ()) -> Tensor:
        """Map the hidden states f32 [W, T, K] of a chunk of whole windows to those after the layer.

        `blocks` are those before each layer that begins a block of attention residuals, if the model has them.
        """
        result, x, routing = self.attend(hidden, blocks)
        if observer is not None:
            observer.block(x, routing)
        if self.is_dense and not self._dense:
            self._dense = [self._read_mlp(self.mlp, device) for device in self._devices]
        if routing is None:
            mlps = [MlpTokens(self.mlp, 0, torch.arange(x.shape[0], device=x.device))]
        else:
            mlps = block_mlps(self._reader, self.mlp, routing)
        if self._latent is None:
            result.add_(self._sum(x, mlps, observer))
        else:
            routed = [mlp for mlp in mlps if mlp.expert is not None]
            result.add_(self.routed_output(self._sum(self.routed_input(x), routed, observer)))
            result.add_(self._sum(x, mlps[len(routed) :], observer))
        if observer is not None:
            observer.output(result)
        return result.view(hidden.shape).to(hidden.device)

    def _sum(self, x: Tensor, mlps: list[MlpTokens], observer: BlockObserver | None) -> Tensor:
        """Return the weighted sum of the outputs of MLPs on their tokens of x, of its shape."""
        total = torch.zeros_like(x)
        with closing(self.outputs(x, mlps)) as outputs:
            for piece, output in outputs:
                if observer is not None:
                    observer.expert(piece)
                weighted = output
                if piece.weights is not None:
                    weighted = output * piece.weights[:, None]
                total.index_add_(0, piece.tokens, weighted)
        return total

    def attend(self, hidden: Tensor, blocks: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Routing | None]:
        """Return what a chunk f32 [W, T, K] is before the MLP: hidden states, MLP's input f32 [T, K], and routing."""
        after = torch.empty_like(hidden, device=self._devices[0])
        x = torch.empty_like(after)
        windows = range(hidden.shape[0])

        def attend(window: int) -> None:
            attention = self._attentions[window % len(self._attentions)]
            after[window], x[window] = attention(hidden[window], *(block[window] for block in blocks))

        with allowing_tf32(self._devices), run_in_order(attend, windows, workers=self._workers) as attended:
            for _ in attended:
                pass
        routing: Routing | None = None
        if not self.is_dense:
            with run_in_order(lambda window: self.route(x[window]), windows, workers=self._workers) as parts:
                routing = Routing.concatenate(list(parts))
        return after.flatten(0, 1), x.flatten(0, 1), routing


@contextmanager
def allowing_tf32(devices: tuple[str, ...]) -> Generator[None]:
    """Allow TF32 in matrix products on CUDA devices, which is a setting of the process."""
    precision = torch.get_float32_matmul_precision()
    if devices[0] != "cpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


_TOKENS = 96
_COLUMNS = TILE + 128
_ROWS = 48
_HEADS = 4


@torch.no_grad()
def arithmetic() -> str:
    """Return the instructions that torch uses on the CPU, and a digest of what it computes with one thread.

    The same sums in another order are other bytes. torch and its libraries choose their instructions by the processor,
    and by variables of the environment. Their names do not say all of it, so a few results are computed and hashed.
    """
    with one_torch_thread():
        digest = blake3()
        for values in _results():
            digest.update(values.contiguous().numpy().tobytes())
    return f"{torch.backends.cpu.get_cpu_capability()} {digest.hexdigest()[:16]}"


def _results() -> list[Tensor]:
    """Return a product, a factor, codes, and the functions of a layer, of fixed numbers."""
    random = np.random.RandomState(0)
    x, weight = (torch.as_tensor(random.standard_normal((n, _COLUMNS))).float() for n in (_TOKENS, _ROWS))
    hessian = damp_hessian(x.T @ x, 0.5)
    codes = round_gptq(weight, 1.0, hessian, kernel_for("cpu"))
    heads = x[:, : _HEADS * 64].view(_TOKENS, _HEADS, 64).transpose(0, 1)
    attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    functions = (torch.nn.functional.silu(x), x.sigmoid(), x.square().mean(dim=1).rsqrt(), x.cos(), attended)
    return [x @ weight.T, hessian.factor, torch.as_tensor(codes.packed), *functions]
