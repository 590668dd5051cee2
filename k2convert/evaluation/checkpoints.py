"""The checkpoints of an evaluation, as their headers describe them: what can be computed, and whether they compare.

Each MLP may be INT4, NVFP4 in either layout, or not quantized, by the tensors that it has. Everything else must not be
quantized. Nothing here reads a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from k2convert.checkpoint.files import file_digest, read_json_file, reading
from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.index import Checkpoint
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.checkpoint.layouts.layout import fp8_tensors
from k2convert.checkpoint.names import CONFIG_NAME, TIKTOKEN_NAME, TOKENIZER_NAME
from k2convert.choices import Activations, RequestedActivations
from k2convert.deploy.serving import nvfp4_scheme
from k2convert.errors import CalibrationError, CheckpointError
from k2convert.models import detect_family, parse_tensor_names, read_architecture, vocabulary_size
from k2convert.models.config import check_source_config, is_tied, network_fields
from k2convert.models.names import CONVERTIBLE_ROLES, OUTPUT_MIXTURE, WEIGHT, WEIGHT_PACKED, WEIGHT_SCALE, Family, Role
from k2convert.models.projections import check_model
from k2convert.records.fingerprint import Source, fingerprint_digest
from k2convert.records.ledger import Ledger

_NUMBERS: Final = ("BF16", "F32", "F16")
_COMPUTED: Final = (
    "Only INT4 as in Kimi K2, MXFP4 as in Kimi K3, NVFP4, BF16, and FP8 as k2convert writes it can be computed."
)
_NOT_COMPUTED: Final = (Role.VISION_TOWER, Role.MM_PROJECTOR)


def _stat(path: Path) -> str:
    with reading(path):
        status = path.stat()
    return f"{status.st_size} bytes, modified {status.st_mtime_ns}, changed {status.st_ctime_ns}"


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoint:
    """A checkpoint, its `name` in the document, its `address` as the user wrote it, and its ledger if it has one."""

    name: str
    address: str
    source: Source
    ledger: Ledger | None

    @property
    def checkpoint(self) -> Checkpoint:
        """Headers, index and config."""
        return self.source.checkpoint

    def inputs(self) -> dict[str, str]:
        """Return the identity of every file that it is computed from, as it is now, by name; raises SourceReadError.

        Of config.json it is the network's fields; the text has the token ids. A shard in a folder is too much to hash.
        Its size and its times stand for it: nobody can set the time of a change of its inode.
        """
        checkpoint = self.checkpoint
        config = read_json_file(checkpoint.folder / CONFIG_NAME)
        if self.source.remote is None:
            shards = {shard: _stat(checkpoint.path(shard)) for shard in checkpoint.headers}
        else:
            shards = self.source.identities()
        return {CONFIG_NAME: fingerprint_digest(network_fields(config)), **shards}


def head_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the final norm, of the output matrix, which is the embedding if the model ties them, and of
    the mixture that the norm reads, if there is one.
    """
    family = detect_family(checkpoint)
    head = family.expected_name(f"lm_head.{WEIGHT}")
    if head not in checkpoint.tensors and is_tied(checkpoint.config):
        head = f"{family.prefix}embed_tokens.{WEIGHT}"
    mixture = (f"{family.prefix}{OUTPUT_MIXTURE}_{part}.{WEIGHT}" for part in ("norm", "proj"))
    return (f"{family.prefix}norm.{WEIGHT}", head, *(name for name in mixture if name in checkpoint.tensors))


def modes_of(checkpoint: Checkpoint, requested: RequestedActivations | None) -> tuple[Activations | None, ...]:
    """Return how the activations of a checkpoint's NVFP4 weights are computed; (None,) if it has no such weights."""
    parameters = {name.rpartition(".")[2] for name in checkpoint.tensors}
    if not any(names.global_scale in parameters for names in LAYOUTS.values()):
        return (None,)
    if requested == "both":
        return "w4a16", "w4a4"
    has_scales = any(names.input_scale in parameters for names in LAYOUTS.values())
    return (requested or nvfp4_scheme(checkpoint.config)[1] or ("w4a4" if has_scales else "w4a16"),)


def check_comparable(evaluated: EvaluatedCheckpoint, reference: EvaluatedCheckpoint) -> None:
    """Refuse a checkpoint of another model than the reference, and the source of the reference (CheckpointError)."""
    headers = {shard: header.digest for shard, header in evaluated.checkpoint.headers.items()}
    if reference.ledger is not None and reference.ledger.source.headers == headers:
        raise CheckpointError(
            f"{evaluated.address}: is the source of {reference.address}, so it is the reference. Pass it first, and "
            "then the result."
        )
    pairs = [
        (read_architecture(compared.checkpoint), vocabulary_size(compared.checkpoint))
        for compared in (evaluated, reference)
    ]
    (ours, tokens), (theirs, their_tokens) = pairs
    for unit, count, expected in (
        ("layers", ours.num_layers, theirs.num_layers),
        ("channels (hidden_size)", ours.hidden_size, theirs.hidden_size),
        ("tokens in its vocabulary", tokens, their_tokens),
        ("layers per block of attention residuals", ours.residual_block, theirs.residual_block),
    ):
        if count != expected:
            raise CheckpointError(
                f"{evaluated.address}: has {count:,} {unit}, but the reference {reference.address} has {expected:,}. "
                "These are different models: name checkpoints of one model."
            )
    for name in (TOKENIZER_NAME, TIKTOKEN_NAME):
        files = [compared.checkpoint.folder / name for compared in (evaluated, reference)]
        if all(path.is_file() for path in files) and file_digest(files[0]) != file_digest(files[1]):
            raise CheckpointError(
                f"{evaluated.address}: {name} is not that of the reference {reference.address}. If it is the same "
                "tokenizer, replace the file by the reference's; else these are different models."
            )


def check_computable(evaluated: EvaluatedCheckpoint) -> None:
    """Refuse a checkpoint with a part in a form that cannot be computed, or other tensors than config.json describes.

    Raises CheckpointError, PlanError.
    """
    checkpoint = evaluated.checkpoint
    family = detect_family(checkpoint)
    architecture = read_architecture(checkpoint)
    is_source = False
    for name, tensor in checkpoint.tensors.items():
        module, _, parameter = name.rpartition(".")
        module_place = family.classify(module)
        if (
            module_place is None
            or module_place.role in _NOT_COMPUTED
            or (module_place.layer or 0) >= architecture.num_layers
        ):
            continue
        if _is_fp8(checkpoint, family, module_place.role, module):
            continue
        if module_place.role not in CONVERTIBLE_ROLES:
            if tensor.dtype not in _NUMBERS:
                raise _quantized(evaluated, tensor, "Only FP8 as k2convert writes it can be computed here.")
        elif parameter in (WEIGHT, WEIGHT_PACKED):
            known = _NUMBERS
            if any(f"{module}.{names.global_scale}" in checkpoint.tensors for names in LAYOUTS.values()):
                known = ("U8",)
            elif parameter == WEIGHT_PACKED:
                known = (family.source_format.packed_dtype,)
                is_source = True
            if tensor.dtype not in known or len(tensor.shape) != 2:
                raise _quantized(evaluated, tensor, _COMPUTED)
    if is_source:
        check_source_config(checkpoint.config, family=family, where=evaluated.address)
    check_model(checkpoint, parse_tensor_names(checkpoint, family=family), architecture, family)


def _is_fp8(checkpoint: Checkpoint, family: Family, role: Role, module: str) -> bool:
    """Return whether a layer is FP8 as k2convert writes it for the family, and one whose inputs engines round too."""
    weight = checkpoint.tensors.get(f"{module}.{WEIGHT}")
    scale = checkpoint.tensors.get(f"{module}.{WEIGHT_SCALE}")
    if weight is None or scale is None or weight.dtype != "F8_E4M3" or module.endswith(family.kept_attention or " "):
        return False
    if role not in family.fp8_roles or len(weight.shape) != 2:
        return False
    expected = fp8_tensors(*weight.shape, has_blocks=family.has_fp8_blocks)
    return (scale.dtype, scale.shape) == expected[1][1:3]


def _quantized(evaluated: EvaluatedCheckpoint, tensor: TensorInfo, remedy: str) -> CheckpointError:
    return CheckpointError(f"{evaluated.address}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}. {remedy}")


def check_text(texts: Sequence[tuple[str, str]], checkpoints: Sequence[EvaluatedCheckpoint]) -> None:
    """Refuse texts that a checkpoint was calibrated on, by the digests in its ledger (CalibrationError)."""
    for evaluated in checkpoints:
        record = None if evaluated.ledger is None else evaluated.ledger.calibration
        used = {digest for _, digest in record.texts} if record is not None else set[str]()
        for name, digest in texts:
            if digest in used:
                raise CalibrationError(
                    f"{name}: {evaluated.address} was calibrated on this text, so it would look better than it is. Use "
                    "a different text."
                )
