"""Reference layers: whether a converted MoE layer still computes what the INT4 layer computed.

check     the stage: the chosen layers of two checkpoints, computed from the same hidden states; what that costs
block     one MoE block in FP32, expert by expert: the source's weights, the converted ones and those of `max`
result    the figures, without torch

The router, the weight decoders, the hidden states and the FP4 activations are in k2convert/forward/.
"""
