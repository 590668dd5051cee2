"""The functions of `formats`, fast: one pass over the bytes of a checkpoint, equal to them byte for byte.

    cpu            what callers use on the CPU: measure, convert, sample; one thread a call, any number of callers
    bf16           the same for BF16 weights
    _cpu           what they call: the extension module made of cpp/, with AVX2 where the CPU has it
    search_tables  which scales can be best for a block: formats.scale_tables, cut to 16 candidates
    decode         measuring anybody's NVFP4 bytes against their source
    cuda           the same on a CUDA device, where triton is installed; it launches cuda_kernel

INT4 weights go from packed bytes and BF16 scale bits to packed bytes and E4M3 bytes, with the pair counts that all
metrics are computed from. Nothing is unpacked, and the only state is each thread's buffers.
"""
