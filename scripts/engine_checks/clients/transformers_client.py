"""Loads a checkpoint of the compressed-tensors layout with transformers, and computes logits with it.

transformers 4 has a Linear for every matrix of an expert, which compressed-tensors decompresses and whose activations
it rounds. transformers 5 fuses a layer's experts, keeps activations as they are, and loses the global scale of NVFP4 on
the way. A few lines here carry the scale along, unless `--as-released` asks for the defect. The checkpoint is compared
with the same model in plain torch, whose activations are rounded here.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from scripts.engine_checks.clients.files import E2M1, PROJECTIONS, Checkpoint
from scripts.engine_checks.clients.outcome import Outcome, read_arguments, save_logits

IS_FUSED = int(transformers.__version__.split(".")[0]) >= 5
KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def main() -> int:
    arguments = read_arguments(__doc__)
    torch.set_num_threads(1)
    if IS_FUSED and not arguments.as_released:
        carry_global_scale()
    import compressed_tensors

    files = Checkpoint(arguments.checkpoint)
    outcome = Outcome(f"transformers {transformers.__version__}")
    outcome.note(f"compressed-tensors {compressed_tensors.__version__}")
    model, report = load(files)
    if arguments.as_released:
        if arguments.windows:
            save_logits(arguments.out, logits(model, arguments.windows))
        return outcome.save(arguments.out)
    for kind in KINDS:
        keys = [key for key in report[kind] if not (IS_FUSED and key.endswith("input_global_scale"))]
        outcome.check(f"no {kind.replace('_', ' ')}", not keys, ", ".join(keys[:4]))
    check_weights(model, files, outcome)
    if not arguments.windows:
        return outcome.save(arguments.out)
    computed = logits(model, arguments.windows)
    reference = plain_model(files, model)
    expected = logits(reference, arguments.windows)
    divergence = max(kl_divergence(p, q) for p, q in zip(expected, computed, strict=True))
    outcome.check("logits equal those of plain torch", divergence == 0, f"KL {divergence:.3g}")
    save_logits(arguments.out, computed, greedy(model, arguments.prompt, arguments.new_tokens))
    return outcome.save(arguments.out)


def carry_global_scale() -> None:
    """transformers 5: decompress fused experts together with their global scales."""
    from compressed_tensors.compressors import BaseCompressor
    from transformers.integrations import compressed_tensors as integration

    plain = integration.CompressedTensorsDequantize.convert
    parameters = ("weight_packed", "weight_scale", "weight_global_scale")

    def convert(self: Any, input_dict: dict[str, Any], *args: Any, **options: Any) -> Any:
        if not any("weight_global_scale" in key and "experts" in key for key in input_dict):
            return plain(self, input_dict, *args, **options)
        config = self.hf_quantizer.compressor.quantization_config
        scheme = integration.get_experts_scheme(config)
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        result = {}
        for key in [key for key in input_dict if "weight_packed" in key]:
            values = {name: input_dict[key.replace("weight_packed", name)] for name in parameters}
            experts = [{name: value[i] for name, value in values.items()} for i in range(len(input_dict[key]))]
            result[key] = torch.stack([compressor.decompress(expert, scheme)["weight"] for expert in experts])
        return result

    integration.CompressedTensorsDequantize.convert = convert


def read_config(files: Checkpoint) -> Any:
    """Return the model's config. transformers knows K2.5; it knows K2's fields as DeepSeek-V3's."""
    if files.prefix:
        return transformers.AutoConfig.from_pretrained(files.folder, attn_implementation="eager")
    renamed = ("quantization_config", "model_type", "architectures")
    fields = {key: value for key, value in files.config.items() if key not in renamed}
    config = transformers.DeepseekV3Config(**fields, attn_implementation="eager")
    config.quantization_config = files.config["quantization_config"]
    return config


def model_class(files: Checkpoint) -> Any:
    """Return the class whose parameters have the checkpoint's names."""
    return transformers.AutoModelForImageTextToText if files.prefix else transformers.DeepseekV3ForCausalLM


def load(files: Checkpoint) -> tuple[Any, dict[str, list[str]]]:
    """Return the model in float32, decompressed, and the lists of keys that did not fit."""
    options: dict[str, Any] = {"config": read_config(files), "dtype": torch.float32, "output_loading_info": True}
    model, report = model_class(files).from_pretrained(Path(files.folder), **options)
    # compressed-tensors decompresses to BF16 in the first forward, whatever the dtype of the rest.
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    return torch.nn.Module.float(model).eval(), {kind: sorted(map(str, report[kind])) for kind in KINDS}


def layers(model: Any) -> Any:
    """Return the decoder layers."""
    return getattr(model.model, "language_model", model.model).layers


def expert_weight(model: Any, layer: int, expert: int, projection: str) -> Tensor:
    """Return a view of an expert's weight [rows, columns]."""
    experts = layers(model)[layer].mlp.experts
    if not IS_FUSED:
        return getattr(experts[expert], projection).weight
    if projection == "down_proj":
        return experts.down_proj[expert]
    return experts.gate_up_proj[expert].chunk(2)[PROJECTIONS.index(projection)]


def check_weights(model: Any, files: Checkpoint, outcome: Outcome) -> None:
    """Decompressed weights against the files' numbers. compressed-tensors decompresses to BF16."""
    exact = 0
    close = 0
    for layer, expert, projection in files.experts():
        weight = expert_weight(model, layer, expert, projection)
        written = files.weight(files.expert(layer, expert, projection))
        exact += torch.equal(weight.double(), written)
        close += torch.allclose(weight.double(), written, rtol=2**-7, atol=0)  # two BF16 roundings at most
    detail = f"{files.num_matrices} matrices, {exact} bit for bit"
    outcome.check("experts hold the files' numbers", close == files.num_matrices, detail)


def fp4_activations(values: Tensor, scale: float) -> Tensor:
    """Round f32 [..., K] to NVFP4 and back: blocks of 16, E4M3 scales of amax / 6, nearest E2M1, ties to even."""
    blocks = values.float().unflatten(-1, (-1, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = (amax / (6 * scale)).clamp(max=448).to(torch.float8_e4m3fn).float() * scale
    steps = torch.where(scales > 0, blocks / scales, 0).abs()
    grid = E2M1[:8]
    middles = (E2M1[:7] + E2M1[1:8]) / 2
    upper = torch.bucketize(steps.contiguous(), middles)  # at or below a middle: the lower neighbour
    tie = (steps == middles[upper.clamp(max=6)]) & (upper % 2 == 1) & (upper < 7)
    return (grid[upper + tie.long()] * blocks.sign() * scales).flatten(-2)


def plain_model(files: Checkpoint, loaded: Any) -> Any:
    """Return the same network without compressed-tensors: weights as loaded, activations rounded by plain torch."""
    config = read_config(files)
    del config.quantization_config
    network = model_class(files)
    build = network.from_config if files.prefix else network
    model = build(config).float().eval()
    own = model.state_dict()
    model.load_state_dict({n: v.float() for n, v in loaded.state_dict().items() if n in own}, strict=False)
    for layer, expert, projection in files.experts():
        scale = files.input_scale(files.expert(layer, expert, projection))
        if scale is not None and not IS_FUSED:
            linear = getattr(layers(model)[layer].mlp.experts[expert], projection)
            linear.register_forward_pre_hook(lambda module, inputs, scale=scale: (fp4_activations(inputs[0], scale),))
    return model


@torch.no_grad()
def logits(model: Any, windows: list[list[int]]) -> list[Tensor]:
    """Return the logits f32 [T, vocabulary] of every window."""
    return [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float() for ids in windows]


def greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Return the ids that continue the prompt greedily."""
    ids = list(prompt)
    for _ in range(new_tokens):
        ids.append(int(logits(model, [ids])[0][-1].argmax()))
    return ids[len(prompt) :]


def kl_divergence(reference: Tensor, other: Tensor) -> float:
    """Return the mean KL divergence in nats of logits [T, vocabulary]; infinite if a logit is not a number."""
    p = reference.double().log_softmax(-1)
    q = other.double().log_softmax(-1)
    value = float((p.exp() * (p - q)).sum(-1).mean())
    return value if math.isfinite(value) else math.inf


if __name__ == "__main__":
    sys.exit(main())
