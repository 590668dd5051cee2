"""What a conversion costs a whole trained model: perplexity, KL divergence and top-1 agreement against its INT4 self.

Two models small enough for a laptop: the tiny K2-architecture checkpoint of the tests, and SmolLM2-135M rewritten as a
K2-named INT4 mixture of experts. `scripts/eval --help` says how to run it.
"""
