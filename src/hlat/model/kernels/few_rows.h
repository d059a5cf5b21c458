/* Products of few rows with a matrix, for decode.c. With AVX-512 or AVX2 only.
 *
 * A matrix (out, in) is read once, in the order in which it is stored. A tile is the products of TILE of its rows with
 * TILE rows of x, LANES sums for each; the sums of LANES rows of the matrix are reduced together. Each number has the
 * same order of sums in every tile.
 */
#ifndef HLAT_FEW_ROWS_H
#define HLAT_FEW_ROWS_H
#include "blocks.h"

#ifdef HAS_VECTORS

#define ALIGNED __attribute__((aligned(64)))

enum { TILE = 4, AHEAD = 1 << 13 }; /* rows of a tile; bytes that are fetched ahead */

/* Products of rows of x with the rows of a matrix, of which ``block`` follow each other, the next ones at ``step``. */
typedef struct {
    int64_t in, outs, rows, x_row, out_row, block, step;
    const void *weight, *up, *bias, *x, *added; /* up: silu(weight x) (up x); added: out = added + product */
    void *out;
} Product;

INLINE Words words_at(const void *from, int64_t at, int64_t left, const int wide) {
    if (per_word(wide) == 1) return (Words)load(from, at, left, wide);
    Words words = {0};
    const char *start = (const char *)from + 2 * at;
    if (left >= 2 * LANES) memcpy(&words, start, sizeof words);
    else memcpy(&words, start, (size_t)left * 2);
    return words;
}

/* As it is stored and read again. */
INLINE Floats nearest(Floats values, const int wide) {
    return wide ? values : (Floats)(widen(rounded(values)) << 16);
}

/* Adds the products of the columns from ``at`` on, ``left`` of them at most. */
INLINE void add_columns(
    Floats sums[TILE][TILE], const void *weight, const void *x, int64_t x_row, int64_t in, int64_t at, int64_t left,
    const int outs, const int rows, const int wide) {
    Words columns[TILE];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) columns[row] = words_at(offset(x, row * x_row, wide), at, left, wide);
#pragma GCC unroll 4
    for (int out = 0; out < outs; out++) {
        const Words words = words_at(offset(weight, out * in, wide), at, left, wide);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
            sums[out][row] = multiply_add(sums[out][row], words, columns[row], wide);
    }
}

/* Unreduced products of ``outs`` rows of weights with ``rows`` rows of x, TILE at most of both: sums of each. */
INLINE void dots(
    Floats (*found)[LANES], const void *weight, const void *x, int64_t x_row, int64_t in, const int outs,
    const int rows, const int wide) {
    const int64_t step = LANES * per_word(wide), complete = in / step * step;
    Floats sums[TILE][TILE];
#pragma GCC unroll 4
    for (int out = 0; out < outs; out++)
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) sums[out][row] = (Floats){0};
    for (int64_t at = 0; at < complete; at += step) {
        if (rows > 1) /* for one row the processor's own prefetching is faster */
#pragma GCC unroll 4
            for (int out = 0; out < outs; out++)
                __builtin_prefetch((const char *)offset(weight, out * in + at, wide) + AHEAD, 0, 0);
        add_columns(sums, weight, x, x_row, in, at, step, outs, rows, wide);
    }
    if (complete < in) add_columns(sums, weight, x, x_row, in, complete, in - complete, outs, rows, wide);
#pragma GCC unroll 4
    for (int out = 0; out < outs; out++)
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) found[row][out] = sums[out][row];
}

/* The sums over the lanes of LANES vectors, each in the same order. */
INLINE Floats totals_of(const Floats *x) {
    Floats four[LANES / 4];
#pragma GCC unroll 4
    for (int at = 0; at < LANES / 4; at++)
        four[at] = add_pairs(add_neighbours(x[4 * at], x[4 * at + 1]), add_neighbours(x[4 * at + 2], x[4 * at + 3]));
    return add_groups(four);
}

/* Unreduced products as ``dots`` computes them, for LANES rows of weights at most. */
INLINE void dots_of_unit(
    Floats (*found)[LANES], const void *weight, const void *x, int64_t x_row, int64_t in, int64_t outs,
    const int rows, const int wide) {
    int64_t out = 0;
    for (; out + TILE <= outs; out += TILE)
        dots((Floats (*)[LANES])(found[0] + out), offset(weight, out * in, wide), x, x_row, in, TILE, rows, wide);
    for (; out < outs; out++)
        dots((Floats (*)[LANES])(found[0] + out), offset(weight, out * in, wide), x, x_row, in, 1, rows, wide);
}

/* LANES outs at most, from ``first`` on, of ``rows`` rows from ``start`` on. */
INLINE void multiply_unit(
    const Product *a, int64_t first, int64_t from, int64_t outs, int64_t start, const int rows, const int wide) {
    Floats found[TILE][LANES], ups[TILE][LANES];
    const void *x = offset(a->x, start * a->x_row, wide);
    if (outs < LANES) memset(found, 0, sizeof found), memset(ups, 0, sizeof ups);
    dots_of_unit(found, offset(a->weight, from, wide), x, a->x_row, a->in, outs, rows, wide);
    if (a->up) dots_of_unit(ups, offset(a->up, from, wide), x, a->x_row, a->in, outs, rows, wide);
    for (int row = 0; row < rows; row++) {
        const int64_t at = (start + row) * a->out_row;
        Floats value = totals_of(found[row]);
        if (a->bias) value += load(a->bias, first, outs, wide);
        value = nearest(value, wide);
        if (a->added) value += load(offset(a->added, at, wide), first, outs, wide);
        if (a->up) value = value / (1.0f + exponential(-value)) * nearest(totals_of(ups[row]), wide);
        store((void *)offset(a->out, at, wide), first, outs, value, wide);
    }
}

/* Rows are units of LANES rows of weights at most. */
INLINE void multiply_rows(const Product *a, int64_t begin, int64_t end, const int wide) {
    const int64_t units = (a->block + LANES - 1) / LANES; /* of a block */
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t within = unit % units * LANES, first = unit / units * a->block + within;
        const int64_t from = (unit / units * a->step + within) * a->in;
        const int64_t outs = a->block - within < LANES ? a->block - within : LANES;
        int64_t row = 0;
        for (; row + 4 <= a->rows; row += 4) multiply_unit(a, first, from, outs, row, 4, wide);
        if (row + 2 <= a->rows) multiply_unit(a, first, from, outs, row, 2, wide), row += 2;
        if (row < a->rows) multiply_unit(a, first, from, outs, row, 1, wide);
    }
}

#endif
#endif
