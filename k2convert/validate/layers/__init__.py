"""Reference layers: whether a converted MoE layer still computes what the INT4 layer computed.

check          the stage: every asked layer of two checkpoints, from the same hidden states
block, router  one MoE block in FP32, and which experts it takes
mlp            an expert with the source's weights, the converted ones and those of `plain`
weights        weights read from a checkpoint by a decoder of their own
hidden_states  what goes into a layer; activations: what NVFP4 does to it
result         the figures, without torch
"""
