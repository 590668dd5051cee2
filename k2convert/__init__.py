"""Convert Kimi K2 INT4 checkpoints to NVFP4 in one streamed, resumable, measured pass.

The package from the ground up. A wing imports itself and what is above it in this list:

    errors      the error tree, and the optional libraries that can be missing
    buffers     a pool of buffers for tensor bytes
    choices     words and sizes that several wings share
    checkpoint  safetensors and checkpoint folders
    quantize    number formats, rules, metrics, kernels: numbers only
    models      families of checkpoints, tensor names, the projections to convert
    hub         everything that talks to the Hub
    plan        recipe, plan, exclude list, inspection
    fit         will it fit, and how to serve it
    records     fingerprint, journal, ledger, events
    forward     one forward pass, and the walk: the loop over the layers of a model
    calibrate   a calibration: statistics of activations, what a conversion uses of them, conversion with gptq
    validate    the servable contract, weight error, reference layers
    report      the report as page, Markdown and picture, and the model card
    job         what a run does, in order
    cli         the command line

The folder guide/ has the pages of `k2convert guide`.
"""

__version__ = "0.2.0"
