"""The parts of a MoE block: router, MLPs, FP4 activations; and threads that compute them.

Router: sigmoid scores, a correction bias only for the choice, group-limited top-k. Kimi uses DeepSeek-V3's
(`topk_method` noaux_tc). The arithmetic here equals transformers' DeepseekV3TopkRouter (5.17) in FP32 bit for bit. The
conversion does not change the router, which decides which experts a wrong weight reaches.

Latent experts (Kimi K3) read and write fewer channels than the model has: they read z = down(x), and up(norm(y)) of
their sum y is added. The router and the shared experts read x itself.

MLP: its weights stay packed until they are used. FP4 activations are computed as the W4A4 kernels do, simulated in
FP32. For every 16 neighboring input channels of a token (vLLM's `cvt_warp_fp16_to_fp4`, the same in SGLang and
TensorRT-LLM; input_scale is a constant of the checkpoint):

    scale = e4m3((amax * fp32(1/6)) * fp32(1/input_scale))     round to nearest even, saturating at 448
    step  = scale * input_scale
    code  = e2m1(x / step)                                     round to nearest even, saturating at 6

A block whose scale rounds to zero becomes zero. Two things differ from the kernels, which take BF16 activations and
approximate the two reciprocals. Here x is FP32, so the only difference from the reference is the four bits.

Threads: each call computes with one torch thread, and results come in the order of the calls. Work is cut in pieces
that do not depend on the number of workers: the same bytes with any number.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from k2convert.checkpoint.index import Checkpoint
from k2convert.choices import BLOCK_SIZE
from k2convert.errors import CheckpointError, quoted
from k2convert.forward.weights import DenseWeight, LinearLayer, WeightReader, exact_weight
from k2convert.models.config import key_of, text_config
from k2convert.models.names import WEIGHT, WEIGHT_PACKED, Family
from k2convert.quantize.formats.nvfp4 import E2M1_MAX, E4M3_MAX

Call = TypeVar("Call")
Result = TypeVar("Result")


@contextmanager
def run_in_order(run: Callable[[Call], Result], calls: Iterable[Call], *, workers: int) -> Generator[Generator[Result]]:
    """Yield the results run(call) of every call in order; `workers` calls run at a time, and one more waits.

    No call runs when the block has ended, even if it failed.
    """
    with closing(_run_in_order(run, calls, workers)) as results:
        yield results


def _run_in_order(run: Callable[[Call], Result], calls: Iterable[Call], workers: int) -> Generator[Result]:

    def without_gradients(call: Call) -> Result:
        with torch.no_grad():  # a setting of each thread
            return run(call)

    waiting: deque[Future[Result]] = deque()
    # oneDNN has a number of threads for each thread that calls it
    with one_torch_thread(), ThreadPoolExecutor(workers, "forward", torch.set_num_threads, (1,)) as pool:
        try:
            for call in calls:
                waiting.append(pool.submit(without_gradients, call))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Let torch use one thread during the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def quantize_activations(x_TK: Tensor, input_scale: float) -> Tensor:
    """Round FP32 activations [.., K] (K a multiple of 16) to the values that FP4 can hold, f32 [.., K]."""
    blocks = x_TK.reshape(*x_TK.shape[:-1], -1, BLOCK_SIZE)
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    global_scale = torch.tensor(input_scale, dtype=torch.float32)
    relative = (amax * torch.tensor(1 / E2M1_MAX, dtype=torch.float32)) * (1.0 / global_scale)
    steps = relative.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float() * global_scale
    divisors = torch.where(steps > 0, steps, torch.inf)  # a block whose scale is flushed becomes zero
    return (round_to_e2m1(blocks / divisors) * steps).reshape(x_TK.shape)


def round_to_e2m1(x: Tensor) -> Tensor:
    """Round FP32 values to E2M1 (0, .5, 1, 1.5, 2, 3, 4, 6 and negatives): nearest, ties to the even code."""
    magnitude = x.abs().clamp(max=E2M1_MAX)
    # The grid has spacing 1/2 below 2, 1 below 4, 2 above; torch.round rounds ties to even, which is the even code.
    spacing = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(magnitude / spacing) * spacing, x)


Activation = Callable[[Tensor, Tensor], Tensor]
"""Makes the input f32 [T, I] of down from what gate and up give, f32 [T, I] each, which it may overwrite."""


def silu_and_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return torch.nn.functional.silu(gate, inplace=True).mul_(up)


def situ_and_multiply(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """Return beta tanh(gate / beta) sigmoid(gate), times up, which `linear_beta` bounds likewise."""
    bounded = up if linear_beta is None else torch.tanh(up / linear_beta).mul_(linear_beta)
    return torch.tanh(gate / beta).mul_(beta).mul_(gate.sigmoid()).mul_(bounded)


def read_activation(checkpoint: Checkpoint, family: Family) -> Activation:
    """Return the activation of a model's MLPs; CheckpointError if it is not that of the family."""
    text = text_config(checkpoint.config)
    where = f"{checkpoint.folder}: config.json:"
    known = family.activation
    if (stated := text.get("hidden_act", "silu")) != known:
        raise CheckpointError(f"{where} hidden_act is {quoted(stated)}, not {known!r}. This is not the model's MLP.")
    if known == "silu":
        return silu_and_multiply
    betas = [text.get(f"activation_situ_{name}") for name in ("beta", "linear_beta")]
    for beta in betas:
        if beta is not None and not (isinstance(beta, int | float) and 0 < beta < math.inf):
            raise CheckpointError(
                f"{where} activation_situ_beta and activation_situ_linear_beta must be positive numbers, not "
                f"{quoted(beta)}. Use the model's own config.json."
            )
    return partial(situ_and_multiply, beta=betas[0] or 1.0, linear_beta=betas[1])


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DEFAULT_INPUT_SCALE = 1.0
"""For a weight-only checkpoint whose activations are quantized: what k2convert itself writes by default."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """down(activation(gate(x), up(x))), inputs quantized if a layer has an input scale."""

    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer
    activation: Activation = field(default=silu_and_multiply, kw_only=True)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Map f32 [T, hidden] to f32 [T, hidden]."""
        return self.outer(self.inner(x_TK))

    def on_both_inputs(self, x_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs on FP32 inputs and on quantized ones; each weight is decoded once."""
        tokens = x_TK.shape[0]
        outputs = self.outer(self.inner(torch.cat([x_TK, x_TK]), tokens), tokens)
        return outputs[:tokens], outputs[tokens:]

    def inner(self, x_TK: Tensor, first: int = 0) -> Tensor:
        """Return the input f32 [T, I] of down. Inputs of the tokens from `first` on are quantized."""
        of_gate = _input(x_TK, self.gate, first)
        of_up = of_gate
        if self.up.input_scale != self.gate.input_scale:
            of_up = _input(x_TK, self.up, first)
        return self.activation(self.gate.weight.linear(of_gate), self.up.weight.linear(of_up))

    def outer(self, inner_TI: Tensor, first: int = 0) -> Tensor:
        """Return down's output f32 [T, hidden]. Inputs of the tokens from `first` on are quantized."""
        return self.down.weight.linear(_input(inner_TI, self.down, first))


def read_mlp(reader: WeightReader, stem: str, *, device: str = "cpu", fp4_inputs: bool = False) -> Mlp:
    """Read the MLP `stem` (a module name without its last part) of any checkpoint; CheckpointError if unusable.

    Each projection is NVFP4, FP8, INT4, MXFP4 or BF16, by the tensors that it has. With `fp4_inputs`, the inputs of
    NVFP4 weights are quantized, by the input scale that is stored, or by 1.
    """
    gate, up, down = (_read_linear(reader, name, fp4_inputs).to(device) for name in projection_names(reader, stem))
    return Mlp(gate, up, down, activation=read_activation(reader.checkpoint, reader.family))


def projection_names(reader: WeightReader, stem: str) -> tuple[str, ...]:
    """Return the modules of gate, up and down of an MLP."""
    names: Iterable[str] = PROJECTIONS
    if ".experts." in stem:
        names = reader.family.projections.values()
    return tuple(f"{stem}.{name}" for name in names)


@dataclass(frozen=True, slots=True)
class MlpTokens:
    """Tokens int64 [t] of the MLP `module`, with the router's weights f32 [t]; shared experts have no number."""

    module: str
    expert: int | None
    tokens: Tensor
    weights: Tensor | None = None


def block_mlps(reader: WeightReader, stem: str, routing: Routing) -> list[MlpTokens]:
    """Return every expert of the block `stem` with the tokens that chose it, then the shared experts with all."""
    experts = range(routing.scores.shape[1])
    routed = [MlpTokens(f"{stem}.experts.{expert}", expert, *routing.tokens_of(expert)) for expert in experts]
    return routed + shared_mlp(reader, stem, routing.experts)


def shared_mlp(reader: WeightReader, stem: str, x: Tensor) -> list[MlpTokens]:
    """Return the shared experts of the block `stem` with all tokens, of which `x` has the first dimension, if any."""
    module = shared_module(reader, stem)
    return [] if module is None else [MlpTokens(module, None, torch.arange(x.shape[0], device=x.device))]


def shared_module(reader: WeightReader, stem: str) -> str | None:
    """Return the name of the shared experts of the block `stem`, None if there are none."""
    module = f"{stem}.shared_experts"
    gate = f"{module}.{PROJECTIONS[0]}"
    return module if reader.has(f"{gate}.{WEIGHT_PACKED}") or reader.has(f"{gate}.{WEIGHT}") else None


def _read_linear(reader: WeightReader, module: str, fp4_inputs: bool) -> LinearLayer:
    if reader.is_fp8(module):
        return LinearLayer(reader.read_fp8(module))
    if not reader.is_nvfp4(module):
        return LinearLayer(exact_weight(reader.read_source(module)))
    layer = reader.read_converted(module)
    return LinearLayer(layer.weight, (layer.input_scale or DEFAULT_INPUT_SCALE) if fp4_inputs else None)


def _input(x_TK: Tensor, layer: LinearLayer, first: int) -> Tensor:
    """Return the input of a layer as it multiplies it: the tokens from `first` on quantized, if it has a scale."""
    if layer.input_scale is None:
        return x_TK
    rounded = quantize_activations(x_TK[first:], layer.input_scale)
    if first == 0:
        return rounded
    return torch.cat([x_TK[:first], rounded])


@dataclass(frozen=True, slots=True)
class LatentColumns:
    """The way to the columns of routed experts that have others than the model, and back."""

    down: DenseWeight
    up: DenseWeight
    norm: Callable[[Tensor], Tensor]

    def leave(self, y_TL: Tensor) -> Tensor:
        """Map the sum of the experts' outputs f32 [T, latent] to f32 [T, hidden]."""
        return self.up.linear(self.norm(y_TL))


def read_latent(reader: WeightReader, stem: str, *, device: str) -> LatentColumns | None:
    """Read the latent projections of the block `stem`; None if its experts have the model's columns."""
    modules = [f"{stem}.routed_expert_{name}" for name in ("down_proj", "up_proj", "norm")]
    if not reader.has(f"{modules[0]}.{WEIGHT}"):
        return None
    down, up = (DenseWeight(reader.read_numbers(f"{module}.{WEIGHT}").to(device)) for module in modules[:2])
    norm = f"{modules[2]}.{WEIGHT}"
    return LatentColumns(down, up, reader.read_norm(norm, device) if reader.has(norm) else lambda y_TL: y_TL)


SCORES_PER_GROUP = 2
"""The score of a group is the sum of its two best scores."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The routing fields of config.json."""

    experts_per_token: int
    num_groups: int
    chosen_groups: int
    normalize: bool
    scaling_factor: float


@dataclass(frozen=True, slots=True)
class Routing:
    """For T tokens and k experts each: `experts` int64 [T, k], `weights` f32 [T, k]; `scores` f32 [T, E] of all."""

    experts: Tensor
    weights: Tensor
    scores: Tensor

    @staticmethod
    def concatenate(parts: Sequence[Routing]) -> Routing:
        """Join the routings of neighboring tokens."""
        return Routing(
            torch.cat([part.experts for part in parts]),
            torch.cat([part.weights for part in parts]),
            torch.cat([part.scores for part in parts]),
        )

    def tokens_of(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the tokens (int64 [t]) that chose an expert, and the weights (f32 [t]) they give it."""
        tokens, slots = torch.where(self.experts == expert)
        return tokens, self.weights[tokens, slots]

    def likeliest_tokens(self, expert: int, count: int) -> Tensor:
        """Return the tokens (int64) with the highest scores for an expert, whether they chose it or not."""
        return torch.topk(self.scores[:, expert], min(count, self.scores.shape[0])).indices


Router = Callable[[Tensor], Routing]
"""Routes hidden states f32 [T, K]."""


def read_router_config(config: Mapping[str, Any], *, where: str, num_experts: int) -> RouterConfig:
    """Read the routing fields of config.json.

    CheckpointError names a field that is missing, not DeepSeek-V3's, or more than can be chosen of `num_experts`.
    """
    text = text_config(config)

    def field(name: str, kind: type) -> Any:
        key = key_of(config, name)
        value = text.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{where}: config.json: {key} is {quoted(value)}, which the router cannot use.")
        return value

    for name, known in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        key = key_of(config, name)
        if text.get(key, known) != known:
            raise CheckpointError(
                f"{where}: config.json: {key} is {quoted(text[key])}, not {known!r}. This is not Kimi's router."
            )

    def count(key: str, most: int) -> int:
        value = field(key, int)
        if not 1 <= value <= most:
            raise CheckpointError(
                f"{where}: config.json: {key_of(config, key)} is {quoted(value)}, but the router of {num_experts:,} "
                f"experts accepts 1 to {most:,}. Use the model's own config.json."
            )
        return value

    num_groups = count("n_group", num_experts // SCORES_PER_GROUP)
    if num_experts % num_groups:
        raise CheckpointError(
            f"{where}: config.json: {key_of(config, 'n_group')} is {num_groups:,}, which does not divide "
            f"{num_experts:,} experts. Use the model's own config.json."
        )
    chosen_groups = count("topk_group", num_groups)
    return RouterConfig(
        experts_per_token=count("num_experts_per_tok", num_experts // num_groups * chosen_groups),
        num_groups=num_groups,
        chosen_groups=chosen_groups,
        normalize=field("norm_topk_prob", bool),
        scaling_factor=float(field("routed_scaling_factor", int | float)),  # type: ignore[arg-type]
    )


def route(hidden_TK: Tensor, weight_EK: Tensor, bias_E: Tensor, config: RouterConfig) -> Routing:
    """Choose experts for FP32 hidden states [T, K] by router weight [E, K] and e_score_correction_bias [E]."""
    num_experts = weight_EK.shape[0]
    scores_TE = torch.nn.functional.linear(hidden_TK.float(), weight_EK.float()).sigmoid()
    # The bias balances the load. It affects the choice but not the weight.
    choice_TE = scores_TE + bias_E.float()
    grouped = choice_TE.view(-1, config.num_groups, num_experts // config.num_groups)
    group_scores = grouped.topk(SCORES_PER_GROUP, dim=-1).values.sum(dim=-1)
    chosen = torch.topk(group_scores, k=config.chosen_groups, dim=-1, sorted=False).indices
    is_open = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, chosen, True)
    choice_TE = grouped.masked_fill(~is_open.unsqueeze(-1), float("-inf")).reshape(-1, num_experts)
    experts = torch.topk(choice_TE, k=config.experts_per_token, dim=-1, sorted=False).indices
    weights = scores_TE.gather(1, experts)
    if config.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(experts=experts, weights=weights * config.scaling_factor, scores=scores_TE)


def read_router(source: WeightReader, stem: str, *, device: str = "cpu") -> Router:
    """Read the router of the block `stem` (`...layers.N.mlp`); CheckpointError if it is not Kimi's."""
    weight = source.read(f"{stem}.gate.weight")
    bias = source.read(f"{stem}.gate.e_score_correction_bias")
    folder = source.checkpoint.folder
    config = read_router_config(source.checkpoint.config, where=str(folder), num_experts=weight.shape[0])
    return partial(route, weight_EK=weight.float().to(device), bias_E=bias.float().to(device), config=config)
