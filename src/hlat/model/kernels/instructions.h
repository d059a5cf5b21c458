/* What compilers do not translate well from the definitions for all processors, with AVX-512's and AVX2's instructions.
 *
 * A vector is one register: 16 numbers with AVX-512, otherwise 8 (compilers compare longer vectors number by number).
 */
#ifndef HLAT_INSTRUCTIONS_H
#define HLAT_INSTRUCTIONS_H
#include <stdint.h>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#define HAS_VECTORS /* attention and decoding are compiled */
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

INLINE Floats fill(float value) { return value - (Floats){0}; }

/* x 2^n. The low bits of ``shifted`` are n. Two factors: 2^n alone need not be a normal number. */
#ifndef __AVX512F__
INLINE Floats times_power(Floats x, Floats shifted, Floats n) {
    (void)n;
    const Ints power = (Ints)shifted - 0x4B400000, first = power >> 1, second = power - first;
    return x * (Floats)((first + 127) << 23) * (Floats)((second + 127) << 23);
}
#endif

#if defined(__AVX512F__)

INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm512_max_ps((__m512)fill(bound), (__m512)x); }
INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm512_min_ps((__m512)fill(bound), (__m512)x); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }
INLINE Floats times_power(Floats x, Floats shifted, Floats n) {
    (void)shifted;
    return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
}
INLINE Words widen(Halves stored) { return (Words)_mm512_cvtepu16_epi32((__m256i)stored); }
INLINE Halves narrow(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }

INLINE Floats pairs(Floats x, Floats y) {
    return (Floats)_mm512_unpacklo_ps((__m512)x, (__m512)y) + (Floats)_mm512_unpackhi_ps((__m512)x, (__m512)y);
}
INLINE Floats fours(Floats x, Floats y) {
    return (Floats)_mm512_unpacklo_pd((__m512d)x, (__m512d)y) + (Floats)_mm512_unpackhi_pd((__m512d)x, (__m512d)y);
}
INLINE Floats quarters(Floats x, Floats y) {
    return (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88) +
           (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xDD);
}
/* Sums of the four vectors of each of four sums of fours. */
INLINE Floats joined(const Floats *four) { return quarters(quarters(four[0], four[1]), quarters(four[2], four[3])); }
INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

#elif defined(HAS_VECTORS)

INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm256_max_ps((__m256)fill(bound), (__m256)x); }
INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm256_min_ps((__m256)fill(bound), (__m256)x); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm256_max_ps((__m256)x, (__m256)y); }
INLINE Words widen(Halves stored) { return (Words)_mm256_cvtepu16_epi32((__m128i)stored); }

/* Words below 2^16: larger ones would be saturated. */
INLINE Halves narrow(Words words) {
    const __m256i halves = _mm256_packus_epi32((__m256i)words, (__m256i)words); /* 0 to 3 twice, 4 to 7 twice */
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
}

INLINE Floats pairs(Floats x, Floats y) {
    return (Floats)_mm256_unpacklo_ps((__m256)x, (__m256)y) + (Floats)_mm256_unpackhi_ps((__m256)x, (__m256)y);
}
INLINE Floats fours(Floats x, Floats y) {
    return (Floats)_mm256_unpacklo_pd((__m256d)x, (__m256d)y) + (Floats)_mm256_unpackhi_pd((__m256d)x, (__m256d)y);
}
/* Sums of the four vectors of each of two sums of fours. */
INLINE Floats joined(const Floats *four) {
    return (Floats)_mm256_permute2f128_ps((__m256)four[0], (__m256)four[1], 0x20) +
           (Floats)_mm256_permute2f128_ps((__m256)four[0], (__m256)four[1], 0x31);
}
INLINE float sum_of(Floats x) {
    const Floats found = fours(pairs(x, x), pairs(x, x));
    return found[0] + found[4];
}

#else

INLINE Floats choose(Ints condition, Floats yes, Floats no) {
    return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no));
}

/* NaN for NaN. */
INLINE Floats at_least(float bound, Floats x) { return choose(x < bound, fill(bound), x); }
INLINE Floats at_most(float bound, Floats x) { return choose(x > bound, fill(bound), x); }

/* y if one is NaN. */
INLINE Floats larger(Floats x, Floats y) { return choose(x > y, x, y); }

INLINE Words widen(Halves stored) { return __builtin_convertvector(stored, Words); }
INLINE Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }

#endif

#endif
