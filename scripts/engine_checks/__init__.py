"""Loads converted checkpoints with the engines that will serve them: vLLM, SGLang, transformers and ModelOpt.

The driver makes one environment for each engine, converts the tiny checkpoint in every layout, activation mode, rule
and form, and starts `clients`, which run inside those environments. A client knows nothing of k2convert: it reads the
files with a few lines of plain torch and compares what the engine holds and computes. Nothing needs a GPU.
"""
