"""Measures what a conversion costs a whole trained model: perplexity, KL divergence and top-1 agreement against INT4.

The two models are small enough for a laptop: the tiny K2-architecture checkpoint of the tests, and SmolLM2-135M
rewritten as an INT4 mixture of experts with K2's names. `scripts/eval --help` lists the commands.
"""
