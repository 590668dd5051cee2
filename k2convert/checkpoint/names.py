"""The name of every file and folder that k2convert reads or writes by name. Nothing else spells them."""

from typing import Final

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_SHARD_NAME: Final = "model.safetensors"
SHARD_SUFFIX: Final = ".safetensors"
HF_QUANT_CONFIG_NAME: Final = "hf_quant_config.json"
LEDGER_NAME: Final = "k2convert.json"
CARD_NAME: Final = "README.md"
WORK_FOLDER: Final = ".k2convert"
