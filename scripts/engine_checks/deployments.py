"""Every kind of serve command, and the folder with the options that the engines' servers have."""

from collections.abc import Iterator
from functools import cache
from itertools import product

from k2convert.choices import Engine
from k2convert.deploy.gpus import GPUS
from k2convert.deploy.layouts import Parallelism
from k2convert.deploy.serving import Deployment, ServeCommand, serve_command
from k2convert.models import FAMILIES
from scripts.engine_checks.variants import ROOT

LISTS = ROOT / "tests" / "data" / "engine-options"
KINDS = (None, *(GPUS[name] for name in ("b200", "h200", "rtx-pro-6000", "dgx-spark")))
LAYOUTS = (
    Parallelism(),
    Parallelism(tensor=8),
    Parallelism(tensor=8, expert=4),
    Parallelism(tensor=8, expert=8),
    Parallelism(tensor=8, expert=8, pipeline=2),
    Parallelism(pipeline=5),
    Parallelism(tensor=8, data_attention=True),
    Parallelism(tensor=8, expert=8, data_attention=True),
    Parallelism(tensor=16, expert=16, pipeline=2),
)
CHECKPOINTS = (*product(("modelopt", "compressed-tensors"), ("w4a4", "w4a16")), (None, None))
SETTINGS = (*product((None, 131_072), (None, "fp8", "bf16"), (None, 0.93), (None, "0123abcd")),)


def deployments() -> Iterator[Deployment]:
    """Yield every combination of what a serve command depends on."""
    for (layout, activations), family, parallelism, gpu, settings in product(
        CHECKPOINTS, FAMILIES, LAYOUTS, KINDS, SETTINGS
    ):
        context, kv_cache, utilization, revision = settings
        yield Deployment(
            model="me/Kimi-NVFP4",
            layout=layout,
            activations=activations,
            family=family.card,
            parallelism=parallelism,
            gpu=gpu,
            context=context,
            kv_cache=kv_cache,
            utilization=utilization,
            revision=revision,
        )


@cache
def commands(engine: Engine) -> tuple[ServeCommand, ...]:
    """Return every command of an engine that differs in its words or notes."""
    return tuple(dict.fromkeys(serve_command(engine, deployment) for deployment in deployments()))
