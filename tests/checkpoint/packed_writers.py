"""Writes linear layers as GPTQ and AWQ folders hold them, from codes: once with shifts of whole arrays, and once bit by bit, as the formats
are described (AutoGPTQ's and AutoAWQ's packing). Shares nothing with `checkpoint`."""

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # what the nibbles of an AWQ word hold, lowest first


def by_shifts(numbers, bits):
    """Rows of codes [n, count] as int32 words, lowest bits first; `bits` divides 32."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), numbers.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        words |= numbers[:, place::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def bit_by_bit(numbers, bits):
    """The same: bit b of number i is bit i * bits + b of its row."""
    rows = []
    for row in numbers:
        stream = [(int(number) >> b) & 1 for number in row for b in range(bits)]
        rows.append([sum(bit << at for at, bit in enumerate(stream[first : first + 32])) for first in range(0, len(stream), 32)])
    return np.array(rows, np.uint32).view(np.int32)


def gptq(codes, scales, zeros, bits=4, less_one=True, g_idx=None, pack=by_shifts):
    """{piece: tensor} of codes [out, in] in the order of the inputs, scales and zeros [out, groups]; `less_one`: version 1."""
    kept = (zeros.astype(int) - less_one) % 2**bits
    found = {
        "qweight": np.ascontiguousarray(pack(codes, bits).T),
        "qzeros": pack(np.ascontiguousarray(kept.T), bits),
        "scales": np.ascontiguousarray(scales.T).astype(np.float16),
    }
    groups = scales.shape[1]
    found["g_idx"] = (np.arange(codes.shape[1]) * groups // codes.shape[1] if g_idx is None else g_idx).astype(np.int32)
    return found


def awq(codes, scales, zeros, pack=by_shifts):
    """Version GEMM: packed along out, eight neighbours to a word in `AWQ_ORDER`."""

    def words(numbers):  # [out, n] -> [n, out / 8]
        turned = np.ascontiguousarray(numbers.T)
        return pack(turned.reshape(len(turned), -1, 8)[:, :, AWQ_ORDER].reshape(turned.shape), 4)

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": np.ascontiguousarray(scales.T).astype(np.float16)}
