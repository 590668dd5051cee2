"""How GPUs share the work of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Parallelism:
    """A layout. `data_attention`: each of the `tensor` GPUs has its own requests. `decode_context` splits the KV cache.

    `expert` is 1 (experts are split like other weights) or the number of GPUs that whole experts are given to.
    """

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data_attention: bool = False
    decode_context: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tensor * self.pipeline
