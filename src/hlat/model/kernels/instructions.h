/* What compilers do not translate well from the definitions for all processors, with AVX-512's and AVX2's instructions.
 *
 * A vector has 16 numbers with AVX-512 and otherwise 8, as AVX2's registers: compilers compare longer ones number by
 * number.
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

/* Every variant has
 *     at_least, at_most     maximum and minimum of a bound and each number; NaN for NaN
 *     larger                the larger of two numbers; the second one if either is NaN
 *     widen, narrow         words from halves, and halves from words below 2^16
 *     times_power           x 2^n, where the low bits of ``shifted`` are n
 * and those of AVX-512 and AVX2, for LANES vectors a, b, c, ... whose lanes are added up together,
 *     sum_of                the sum of all lanes of one vector
 *     add_neighbours        within each group of four lanes: a0 + a2, b0 + b2, a1 + a3, b1 + b3
 *     add_pairs             of two of these, of a b and of c d: the sum of the group in a, in b, in c, in d
 *     add_groups            the sums of the groups: LANES sums, in the order of the vectors
 */
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

INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE Floats add_neighbours(Floats a, Floats b) {
    return (Floats)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (Floats)_mm512_unpackhi_ps((__m512)a, (__m512)b);
}
INLINE Floats add_pairs(Floats ab, Floats cd) {
    return (Floats)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd) + (Floats)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
}
INLINE Floats add_halves(Floats x, Floats y) { /* groups 0 and 1, 2 and 3 of each, those of x first */
    return (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0x88) +
           (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)y, 0xDD);
}
INLINE Floats add_groups(const Floats four[LANES / 4]) {
    return add_halves(add_halves(four[0], four[1]), add_halves(four[2], four[3]));
}

#elif defined(HAS_VECTORS)

INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm256_max_ps((__m256)fill(bound), (__m256)x); }
INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm256_min_ps((__m256)fill(bound), (__m256)x); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm256_max_ps((__m256)x, (__m256)y); }
INLINE Words widen(Halves stored) { return (Words)_mm256_cvtepu16_epi32((__m128i)stored); }
INLINE Halves narrow(Words words) {
    const __m256i halves = _mm256_packus_epi32((__m256i)words, (__m256i)words); /* 0 to 3 twice, 4 to 7 twice */
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
}

INLINE Floats add_neighbours(Floats a, Floats b) {
    return (Floats)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (Floats)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}
INLINE Floats add_pairs(Floats ab, Floats cd) {
    return (Floats)_mm256_unpacklo_pd((__m256d)ab, (__m256d)cd) + (Floats)_mm256_unpackhi_pd((__m256d)ab, (__m256d)cd);
}
INLINE Floats add_groups(const Floats four[LANES / 4]) {
    return (Floats)_mm256_permute2f128_ps((__m256)four[0], (__m256)four[1], 0x20) +
           (Floats)_mm256_permute2f128_ps((__m256)four[0], (__m256)four[1], 0x31);
}
INLINE float sum_of(Floats x) {
    const Floats sums = add_pairs(add_neighbours(x, x), add_neighbours(x, x));
    return sums[0] + sums[4];
}

#else

INLINE Floats choose(Ints condition, Floats yes, Floats no) {
    return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no));
}

INLINE Floats at_least(float bound, Floats x) { return choose(x < bound, fill(bound), x); }
INLINE Floats at_most(float bound, Floats x) { return choose(x > bound, fill(bound), x); }
INLINE Floats larger(Floats x, Floats y) { return choose(x > y, x, y); }

INLINE Words widen(Halves stored) { return __builtin_convertvector(stored, Words); }
INLINE Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }

#endif

#ifndef __AVX512F__
/* Two factors: 2^n alone need not be a normal number. */
INLINE Floats times_power(Floats x, Floats shifted, Floats n) {
    (void)n;
    const Ints power = (Ints)shifted - 0x4B400000, first = power >> 1, second = power - first;
    return x * (Floats)((first + 127) << 23) * (Floats)((second + 127) << 23);
}
#endif

#endif
