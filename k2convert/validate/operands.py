"""Are the two operands of a validation the right way round?"""

from collections.abc import Mapping

from k2convert.checkpoint.header import TensorInfo
from k2convert.checkpoint.layouts import LAYOUTS
from k2convert.errors import CheckpointError
from k2convert.models.names import WEIGHT_PACKED
from k2convert.validate.contract.subject import Subject

_GLOBAL_SCALES = tuple(names.global_scale for names in LAYOUTS.values())


def check_operands(subject: Subject) -> None:
    """Refuse an INT4 source as the result, and an NVFP4 checkpoint as the source (CheckpointError)."""
    folder, source = subject.folder, subject.source
    is_source = _is_int4(subject.tensors) and not _is_nvfp4(subject.tensors) and not subject.is_int4
    is_result = source is not None and _is_nvfp4(source.tensors)
    if is_source and source is not None and is_result:
        raise CheckpointError(
            f"{folder} is an INT4 checkpoint and {source.folder} an NVFP4 one. Swap them: the result comes first, the "
            "INT4 source after --source."
        )
    if is_source:
        raise CheckpointError(
            f"{folder}: its weights are INT4, so it is a source, not a result. Pass the folder of a finished "
            "conversion, and the INT4 source with --source."
        )
    if source is not None and is_result:
        raise CheckpointError(
            f"{source.folder}: its weights are NVFP4, so it is not the source. Pass the INT4 checkpoint that the "
            "result was converted from with --source."
        )


def _is_int4(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(name.endswith(f".{WEIGHT_PACKED}") and tensor.dtype == "I32" for name, tensor in tensors.items())


def _is_nvfp4(tensors: Mapping[str, TensorInfo]) -> bool:
    return any(name.rpartition(".")[2] in _GLOBAL_SCALES for name in tensors)
