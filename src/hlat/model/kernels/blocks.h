/* Products, transpositions and packing of blocks of words, for attention.c. With AVX-512 or AVX2 only.
 *
 * A word has 32 bits: a pair of bf16 numbers whose products are added up by one instruction, or one fp32 number.
 */
#ifndef HLAT_BLOCKS_H
#define HLAT_BLOCKS_H
#include "vectors.h"

enum { SIDE = 64, VECTORS = SIDE / LANES, WIDEST = 256 };

/* Strides are in elements. */
typedef struct {
    void *data;
    int64_t batch, head, row;
} Heads;

#ifdef HAS_VECTORS

/* A function that is compiled once: inlined everywhere, these would take the compiler seconds. */
#define ONCE __attribute__((noinline)) static

/* Elements of the contraction that a word holds. */
#ifdef __AVX512BF16__
INLINE int64_t per_word(const int wide) { return wide ? 1 : 2; }
INLINE Floats multiply_add(Floats sum, Words a, Words b, const int wide) {
    if (wide) return sum + (Floats)a * (Floats)b;
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)a);
}
#else
INLINE int64_t per_word(const int wide) {
    (void)wide;
    return 1;
}
INLINE Floats multiply_add(Floats sum, Words a, Words b, const int wide) {
    (void)wide;
    return sum + (Floats)a * (Floats)b;
}
#endif

/* The words of two numbers of each lane that follow each other in a contraction; of the first if a word has one. */
INLINE Words paired(Floats first, Floats second, const int wide) {
    if (per_word(wide) == 1) return (Words)first;
    return widen(rounded(first)) | widen(rounded(second)) << 16;
}

/* ``rows`` x ``vectors`` vectors of C += A B, with a contraction of ``depth`` words. */
INLINE void multiply_tile(
    float *c, int64_t c_row, const uint32_t *a, int64_t a_row, int64_t a_step, const uint32_t *b, int64_t b_row,
    int64_t depth, const int rows, const int vectors, const int add, const int wide) {
    Floats sums[8][4];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vector = 0; vector < vectors; vector++)
            sums[row][vector] = add ? *(const Floats *)(c + row * c_row + vector * LANES) : (Floats){0};
    for (int64_t step = 0; step < depth; step++) {
        Words columns[4];
#pragma GCC unroll 4
        for (int vector = 0; vector < vectors; vector++)
            columns[vector] = *(const Words *)(b + step * b_row + vector * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const Words word = a[row * a_row + step * a_step] - (Words){0};
#pragma GCC unroll 4
            for (int vector = 0; vector < vectors; vector++)
                sums[row][vector] = multiply_add(sums[row][vector], word, columns[vector], wide);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int vector = 0; vector < vectors; vector++)
            *(Floats *)(c + row * c_row + vector * LANES) = sums[row][vector];
}

/* Rows and vectors of a tile: as many sums as the processor has registers for, and few reads for each of them. */
#ifdef __AVX512F__
enum { WIDE_ROWS = 4, WIDE_TILE = 4, ROWS = 8, TILE_VECTORS = 2 };
#else
enum { WIDE_ROWS = 4, WIDE_TILE = 3, ROWS = 4, TILE_VECTORS = 2 };
#endif

INLINE void multiply_all(
    float *c, int64_t c_row, const uint32_t *a, int64_t a_row, int64_t a_step, const uint32_t *b, int64_t b_row,
    int64_t depth, int64_t rows, int64_t columns, const int add, const int wide) {
    int64_t column = 0;
    for (; column + WIDE_TILE * LANES <= columns; column += WIDE_TILE * LANES)
        for (int64_t row = 0; row < rows; row += WIDE_ROWS)
            multiply_tile(
                c + row * c_row + column, c_row, a + row * a_row, a_row, a_step, b + column, b_row, depth, WIDE_ROWS,
                WIDE_TILE, add, wide);
    for (; column + TILE_VECTORS * LANES <= columns; column += TILE_VECTORS * LANES)
        for (int64_t row = 0; row < rows; row += ROWS)
            multiply_tile(
                c + row * c_row + column, c_row, a + row * a_row, a_row, a_step, b + column, b_row, depth, ROWS,
                TILE_VECTORS, add, wide);
    for (; column < columns; column += LANES)
        for (int64_t row = 0; row < rows; row += 8)
            multiply_tile(
                c + row * c_row + column, c_row, a + row * a_row, a_row, a_step, b + column, b_row, depth, 8, 1, add,
                wide);
}

/* C (rows x columns) = A B, or C += A B; rows a multiple of 8, columns a multiple of LANES. */
ONCE void multiply(
    float *c, int64_t c_row, const uint32_t *a, int64_t a_row, int64_t a_step, const uint32_t *b, int64_t b_row,
    int64_t depth, int64_t rows, int64_t columns, int add, int wide) {
    if (per_word(wide) == 1) {
        if (add) multiply_all(c, c_row, a, a_row, a_step, b, b_row, depth, rows, columns, 1, 1);
        else multiply_all(c, c_row, a, a_row, a_step, b, b_row, depth, rows, columns, 0, 1);
    } else {
        if (add) multiply_all(c, c_row, a, a_row, a_step, b, b_row, depth, rows, columns, 1, 0);
        else multiply_all(c, c_row, a, a_row, a_step, b, b_row, depth, rows, columns, 0, 0);
    }
}

/* Transposes LANES x LANES words. */
#ifdef __AVX512F__
ONCE void transpose_tile(uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row) {
    __m512i x[LANES], y[LANES];
#pragma GCC unroll 16
    for (int row = 0; row < LANES; row++) x[row] = _mm512_loadu_si512(from + row * from_row);
#pragma GCC unroll 8
    for (int row = 0; row < LANES; row += 2) {
        y[row] = _mm512_unpacklo_epi32(x[row], x[row + 1]);
        y[row + 1] = _mm512_unpackhi_epi32(x[row], x[row + 1]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < LANES; row += 4) {
        x[row] = _mm512_unpacklo_epi64(y[row], y[row + 2]);
        x[row + 1] = _mm512_unpackhi_epi64(y[row], y[row + 2]);
        x[row + 2] = _mm512_unpacklo_epi64(y[row + 1], y[row + 3]);
        x[row + 3] = _mm512_unpackhi_epi64(y[row + 1], y[row + 3]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 4; row++) {
        y[row] = _mm512_shuffle_i32x4(x[row], x[row + 4], 0x88);
        y[row + 4] = _mm512_shuffle_i32x4(x[row], x[row + 4], 0xDD);
        y[row + 8] = _mm512_shuffle_i32x4(x[row + 8], x[row + 12], 0x88);
        y[row + 12] = _mm512_shuffle_i32x4(x[row + 8], x[row + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 4; row++) {
        _mm512_storeu_si512(to + row * to_row, _mm512_shuffle_i32x4(y[row], y[row + 8], 0x88));
        _mm512_storeu_si512(to + (row + 4) * to_row, _mm512_shuffle_i32x4(y[row + 4], y[row + 12], 0x88));
        _mm512_storeu_si512(to + (row + 8) * to_row, _mm512_shuffle_i32x4(y[row], y[row + 8], 0xDD));
        _mm512_storeu_si512(to + (row + 12) * to_row, _mm512_shuffle_i32x4(y[row + 4], y[row + 12], 0xDD));
    }
}
#else
ONCE void transpose_tile(uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row) {
    __m256i x[LANES], y[LANES];
#pragma GCC unroll 8
    for (int row = 0; row < LANES; row++) x[row] = _mm256_loadu_si256((const __m256i *)(from + row * from_row));
#pragma GCC unroll 4
    for (int row = 0; row < LANES; row += 2) {
        y[row] = _mm256_unpacklo_epi32(x[row], x[row + 1]);
        y[row + 1] = _mm256_unpackhi_epi32(x[row], x[row + 1]);
    }
#pragma GCC unroll 2
    for (int row = 0; row < LANES; row += 4) {
        x[row] = _mm256_unpacklo_epi64(y[row], y[row + 2]);
        x[row + 1] = _mm256_unpackhi_epi64(y[row], y[row + 2]);
        x[row + 2] = _mm256_unpacklo_epi64(y[row + 1], y[row + 3]);
        x[row + 3] = _mm256_unpackhi_epi64(y[row + 1], y[row + 3]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 4; row++) {
        _mm256_storeu_si256((__m256i *)(to + row * to_row), _mm256_permute2x128_si256(x[row], x[row + 4], 0x20));
        _mm256_storeu_si256((__m256i *)(to + (row + 4) * to_row), _mm256_permute2x128_si256(x[row], x[row + 4], 0x31));
    }
}
#endif

/* Transposes a matrix of words; both sides multiples of LANES. */
ONCE void transpose(
    uint32_t *to, int64_t to_row, const uint32_t *from, int64_t from_row, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; row += LANES)
        for (int64_t column = 0; column < columns; column += LANES)
            transpose_tile(to + column * to_row + row, to_row, from + row * from_row + column, from_row);
}

/* A block of SIDE rows, from ``start`` of ``count`` rows on, with zeros beyond the last row and the width. */
typedef struct {
    const char *data;
    int64_t row_bytes, here, width;
} Block;

INLINE const void *head_of(const Heads *x, int64_t batch, int64_t head, const int wide) {
    return offset(x->data, batch * x->batch + head * x->head, wide);
}

INLINE Block block_of(
    const Heads *x, int64_t batch, int64_t head, int64_t start, int64_t count, int64_t width, const int wide) {
    const char *data = (const char *)head_of(x, batch, head, wide) + start * x->row * (wide ? 4 : 2);
    return (Block){data, x->row * (wide ? 4 : 2), count - start < SIDE ? count - start : SIDE, width};
}

INLINE Floats element(const Block *x, int64_t row, int64_t at, const int wide) {
    if (row >= x->here || at >= x->width) return (Floats){0};
    return load(x->data + row * x->row_bytes, at, x->width - at, wide);
}

/* Words of consecutive elements of each row: (SIDE, width / per_word). The row length is a multiple of LANES words. */
ONCE void pack_rows(uint32_t *to, int64_t words, const Block *x, int wide) {
    for (int64_t row = 0; row < SIDE; row++) {
        uint32_t *line = to + row * words;
        if (per_word(wide) == 1 && !wide) {
            for (int64_t at = 0; at < words; at += LANES) *(Floats *)(line + at) = element(x, row, at, wide);
            continue;
        }
        const int64_t bytes = row < x->here ? x->width * (wide ? 4 : 2) : 0;
        memcpy(line, x->data + row * x->row_bytes, (size_t)bytes);
        memset((char *)line + bytes, 0, (size_t)(4 * words - bytes));
    }
}

/* Words of elements of consecutive rows: (SIDE / per_word, padded width). */
ONCE void pack_pairs(uint32_t *to, int64_t padded, const Block *x, int wide) {
    if (per_word(wide) == 1) {
        pack_rows(to, padded, x, wide);
        return;
    }
    for (int64_t row = 0; row < SIDE; row += 2)
        for (int64_t at = 0; at < padded; at += LANES)
            *(Words *)(to + row / 2 * padded + at) =
                paired(element(x, row, at, wide), element(x, row + 1, at, wide), wide);
}

#endif
#endif
