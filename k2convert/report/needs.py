"""What a result needs: memory and GPUs, from its tensors' headers."""

from collections.abc import Iterable
from pathlib import Path

from k2convert.checkpoint.files import read_json_file
from k2convert.checkpoint.names import CONFIG_NAME
from k2convert.errors import K2ConvertError
from k2convert.fit.needs import Needs, state_needs
from k2convert.fit.subject import read_result
from k2convert.fit.weights import Tensor
from k2convert.models import find_family
from k2convert.records.ledger import find_ledger


def result_needs(folder: Path, tensors: Iterable[Tensor]) -> Needs | None:
    """Say what the finished result in `folder` needs; its shards need not be there.

    None if `fit` does not know the model, or if ledger or config.json cannot be read: the caller reports that.
    """
    try:
        ledger = find_ledger(folder)
        if ledger is None or ledger.family is None:
            return None
        config, family = read_json_file(folder / CONFIG_NAME), find_family(ledger.family)
        return state_needs(read_result(tensors, family=family, config=config, where=str(folder)))
    except K2ConvertError:
        return None
