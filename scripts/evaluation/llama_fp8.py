"""`k2convert`, but with FP8 of Llama's attention too, which SmolLM2 has and `run` refuses: no engine loads it."""

from k2convert.__main__ import main
from k2convert.models.kimi import K2_THINKING

if __name__ == "__main__":
    patterns = K2_THINKING.linear_patterns
    llama = r".*self_attn\.[qkv]_proj$"
    object.__setattr__(K2_THINKING, "linear_patterns", lambda *given: [*patterns(*given), llama])
    main()
