"""Reference layers: whether a converted MoE layer still computes what the INT4 layer computed.

check     the chosen layers of two checkpoints, computed from the same hidden states; what that costs
result    the figures, without torch
"""
