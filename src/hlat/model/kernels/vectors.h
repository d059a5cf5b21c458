/* Vectors of numbers and what the kernels of this folder compute with them.
 *
 * Operands are bf16 or fp32 (``wide``), everything between is fp32 and rounded once.
 */
#ifndef HLAT_VECTORS_H
#define HLAT_VECTORS_H
#include <math.h>
#include <string.h>

#include "instructions.h"

/* To bf16, to nearest, ties to even. The instruction rounds subnormal numbers, below 2^-126, to 0. */
INLINE Halves rounded(Floats values) {
#ifdef __AVX512BF16__
    const __m256bh found = _mm512_cvtneps_pbh((__m512)values);
    Halves stored;
    memcpy(&stored, &found, sizeof stored);
    return stored;
#else
    const Words bits = (Words)values, is_nan = (Words)(values != values);
    const Words nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return narrow((is_nan & 0x7FC0u) | (~is_nan & nearest));
#endif
}

/* Element at ``at`` and those after it: ``left`` of them, and zeros. */
INLINE Floats load(const void *from, int64_t at, int64_t left, const int wide) {
    const size_t size = wide ? 4 : 2;
    const char *start = (const char *)from + at * (int64_t)size;
    Floats values = {0};
    Halves stored = {0};
    if (wide) {
        if (left >= LANES) memcpy(&values, start, sizeof values);
        else memcpy(&values, start, (size_t)left * size);
        return values;
    }
    if (left >= LANES) memcpy(&stored, start, sizeof stored);
    else memcpy(&stored, start, (size_t)left * size);
    return (Floats)(widen(stored) << 16);
}

INLINE void store(void *to, int64_t at, int64_t left, Floats values, const int wide) {
    const size_t size = wide ? 4 : 2;
    char *start = (char *)to + at * (int64_t)size;
    const Halves stored = rounded(values);
    if (left >= LANES) memcpy(start, wide ? (const void *)&values : (const void *)&stored, LANES * size);
    else memcpy(start, wide ? (const void *)&values : (const void *)&stored, (size_t)left * size);
}

INLINE const void *offset(const void *from, int64_t elements, const int wide) {
    return (const char *)from + elements * (wide ? 4 : 2);
}

INLINE float total(Floats sums) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

INLINE int any(Ints conditions) {
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= conditions[lane];
    return found != 0;
}

INLINE float largest(Floats values) {
    float found = values[0];
    for (int lane = 1; lane < LANES; lane++) found = values[lane] > found ? values[lane] : found;
    return found;
}

/* e^x: x = n log 2 + r, |r| <= log 2 / 2; polynomial of the Cephes library (Moshier) for e^r. Relative error below
 * 2^-22; 0 and infinity beyond the range of fp32, NaN for NaN. */
INLINE Floats exponential(Floats x) {
    x = at_most(89.0f, at_least(-104.0f, x));
    const float shift = 12582912.0f; /* 1.5 * 2^23: the sum is rounded to an integer, which is in its low bits */
    const Floats shifted = x * 1.44269504088896341f + shift;
    const Floats n = shifted - shift;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return times_power(p * (r * r) + r + 1.0f, shifted, n);
}

#endif
