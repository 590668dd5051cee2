"""Decodes every converted matrix with NVIDIA ModelOpt's own NVFP4QTensor."""

import sys

import torch
from modelopt import __version__
from modelopt.torch.quantization.qtensor import NVFP4QTensor

from scripts.engine_checks.clients.files import Checkpoint
from scripts.engine_checks.clients.outcome import Outcome, read_arguments


def main() -> int:
    arguments = read_arguments(__doc__)
    files = Checkpoint(arguments.checkpoint)
    outcome = Outcome(f"ModelOpt {__version__}")
    exact = 0
    close = 0
    for position in files.experts():
        name = files.expert(*position)
        codes, block_scales, global_scale = (files.get(f"{name}.{parameter}") for parameter in files.parameters[:3])
        tensor = NVFP4QTensor(torch.Size((codes.shape[0], codes.shape[1] * 2)), torch.float32, codes)
        decoded = tensor.dequantize(
            dtype=torch.float32, scale=block_scales, double_scale=global_scale, block_sizes={-1: 16}
        )
        written = files.weight(name)
        exact += torch.equal(decoded, written.float())
        # One rounding of the two scales' product and one of the value.
        close += torch.allclose(decoded.double(), written, rtol=2**-22, atol=0)
    detail = f"{files.num_matrices} matrices, {exact} bit for bit"
    outcome.check("every matrix decodes to the files' numbers", close == files.num_matrices, detail)
    return outcome.save(arguments.out)


if __name__ == "__main__":
    sys.exit(main())
