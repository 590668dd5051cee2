"""models.names."""

from dataclasses import dataclass
from enum import StrEnum

WEIGHT = "weight"


WEIGHT_PACKED = "weight_packed"


WEIGHT_SCALE = "weight_scale"


WEIGHT_SHAPE = "weight_shape"


INT4_PARAMETERS = (WEIGHT_PACKED, WEIGHT_SCALE, WEIGHT_SHAPE)


class Role(StrEnum):
    """What a module is in the model; recipes name the first three."""

    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    DENSE_MLP = "dense_mlp"
    ATTENTION = "attention"
    ROUTER = "router"
    NORM = "norm"
    EMBEDDINGS = "embeddings"
    LM_HEAD = "lm_head"
    VISION_TOWER = "vision_tower"
    MM_PROJECTOR = "mm_projector"


CONVERTIBLE_ROLES = (Role.EXPERTS, Role.SHARED_EXPERTS, Role.DENSE_MLP)


class Family(StrEnum):
    """Checkpoint layouts that are known; K2.6 and K2.7-Code share K2.5's."""

    K2_THINKING = "kimi-k2-thinking"
    K2_5 = "kimi-k2.5"


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor name taken apart; `projection` is gate, up or down, None outside MLPs."""

    module: str
    parameter: str
    role: Role
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None

    @property
    def sharing_key(self) -> str:
        """Modules with the same key must share one global scale: gate and up of one MLP, down alone."""
        stem = self.module.rsplit(".", 1)[0]
        return f"{stem}.{'gate_up' if self.projection in ('gate', 'up') else 'down'}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The counts of config.json that names and shapes are held against."""

    num_layers: int
    num_dense_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
