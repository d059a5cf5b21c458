/* Causal softmax attention on a CPU with AVX-512 or AVX2, forward and backward, without a matrix of all scores.
 *
 * A part of kernels.c. The algorithm is FlashAttention's (Dao 2023): blocks of SIDE queries meet blocks
 * of SIDE keys; forward keeps the running maximum and sum of each query, backward computes the scores again from the
 * log-sum-exp. Each query attends to the keys ``first`` to ``last`` of its row: the causal mask, documents, windows and
 * the chunks of context parallelism are all ranges of keys. Blocks of keys that no query of a block attends to are
 * skipped.
 *
 * Scores are computed transposed, a row for each key and a lane for each query, so that maxima and sums over keys need
 * no sums across lanes, and keys and values need no transposition:
 *
 *     S' = K Q'    P' = exp(S' - log-sum-exp)    O' = V' P'
 *     dP' = V dO'    dS' = P' (dP' - sum(dO O))    dV = P' dO    dK = dS' Q    dQ' = K' dS'
 *
 * All products have one form (``multiply``): 32-bit words of A, broadcast, times vectors of words of B. A word is a
 * pair of bf16 numbers whose products are added up by one instruction, or one fp32 number. With bf16 instructions, P
 * and dS of bf16 operands are rounded to bf16, as FlashAttention does; without, bf16 operands are widened to fp32.
 * Everything else is fp32.
 *
 * A block of queries of a head is one thread's in forward, a complete query head in backward, and the sum over the
 * query heads of a group has a fixed order: so the number of threads changes no bit.
 */

#include "blocks.h"

typedef struct {
    int64_t heads, groups, queries, keys, width;
    int64_t padded_keys, padded_width; /* multiples of SIDE and of LANES: rows of key_sums and value_sums */
    float scale;
    const int32_t *first, *last; /* (batch, queries): range of keys of each query */
    Heads q, k, v, out, gradient, by_q, by_k, by_v;
    Heads log_sums;               /* fp32, a number for each query */
    float *key_sums, *value_sums; /* (batch, heads, padded_keys, padded_width): gradients from each query head */
} Attention;

#ifdef HAS_VECTORS

/* Writes rows of a transposed block (width, SIDE), each times the factor of its row. */
ONCE void store_transposed(
    const Heads *x, int64_t batch, int64_t head, int64_t start, int64_t count, int64_t width, const float *sums,
    const float *factors, int wide) {
    char *data = (char *)head_of(x, batch, head, wide) + start * x->row * (wide ? 4 : 2);
    const int64_t here = count - start < SIDE ? count - start : SIDE;
    for (int64_t at = 0; at < width; at += LANES)
        for (int64_t row = 0; row < here; row += LANES) {
            Floats tile[LANES];
            transpose_tile((uint32_t *)tile, LANES, (const uint32_t *)(sums + at * SIDE + row), SIDE);
            for (int64_t line = row; line < here && line < row + LANES; line++)
                store(data + line * x->row * (wide ? 4 : 2), at, width - at, tile[line - row] * factors[line], wide);
        }
}

/* The ranges of keys of a block of queries. Queries beyond the last attend to none. */
typedef struct {
    Ints first[VECTORS], last[VECTORS];
    int64_t begin, end;          /* keys that any query attends to */
    int64_t all_begin, all_end;  /* keys that all of them attend to */
} Ranges;

INLINE Ranges ranges_of(const Attention *a, int64_t batch, int64_t start) {
    Ranges found = {.begin = a->keys, .end = 0, .all_begin = 0, .all_end = a->keys};
    for (int64_t lane = 0; lane < SIDE; lane++) {
        const int64_t query = start + lane, inside = query < a->queries;
        const int32_t first = inside ? a->first[batch * a->queries + query] : 1;
        const int32_t last = inside ? a->last[batch * a->queries + query] : 0;
        found.first[lane / LANES][lane % LANES] = first;
        found.last[lane / LANES][lane % LANES] = last;
        if (!inside) continue;
        if (first < found.begin) found.begin = first;
        if (last + 1 > found.end) found.end = last + 1;
        if (first > found.all_begin) found.all_begin = first;
        if (last + 1 < found.all_end) found.all_end = last + 1;
    }
    return found;
}

INLINE int is_masked(const Ranges *ranges, int64_t key) {
    return key < ranges->all_begin || key + SIDE > ranges->all_end;
}

/* The values of queries that attend to a key; ``other`` for those that do not. */
INLINE Floats attended(const Ranges *ranges, int vector, int64_t key, Floats values, float other) {
    const Ints keys = (int32_t)key - (Ints){0};
    const Ints inside = (ranges->first[vector] <= keys) & (keys <= ranges->last[vector]);
    return (Floats)((inside & (Ints)values) | (~inside & (Ints)fill(other)));
}

INLINE float *log_sum_of(const Attention *a, int64_t batch, int64_t head, int64_t query) {
    const Heads *x = &a->log_sums;
    return (float *)x->data + batch * x->batch + head * x->head + query * x->row;
}

#define ALIGNED __attribute__((aligned(64)))

/* What a thread computes with: half a megabyte, which a stack may not have. */
typedef struct {
    uint32_t rows[SIDE * WIDEST] ALIGNED, value_rows[SIDE * WIDEST] ALIGNED;
    uint32_t queries_across[SIDE * WIDEST] ALIGNED, gradients_across[SIDE * WIDEST] ALIGNED;
    uint32_t key_pairs[SIDE * WIDEST] ALIGNED, query_pairs[SIDE * WIDEST] ALIGNED;
    uint32_t gradient_pairs[SIDE * WIDEST] ALIGNED, value_pairs[SIDE * WIDEST] ALIGNED;
    uint32_t chances[SIDE * SIDE] ALIGNED, changes[SIDE * SIDE] ALIGNED, changes_across[SIDE * SIDE] ALIGNED;
    float scores[SIDE * SIDE] ALIGNED, products[SIDE * SIDE] ALIGNED, sums[WIDEST * SIDE] ALIGNED;
} Scratch;

/* Rows are blocks of queries: of a head, of all heads, of all rows of the batch. */
INLINE void attend(const Attention *a, int64_t begin, int64_t end, Scratch *scratch, const int wide) {
    const int64_t blocks = (a->queries + SIDE - 1) / SIDE, padded = a->padded_width, step = per_word(wide);
    const int64_t words = (padded / step + LANES - 1) / LANES * LANES;
    uint32_t *restrict rows = scratch->rows, *restrict across = scratch->queries_across;
    uint32_t *restrict values = scratch->value_pairs, *restrict chances = scratch->chances;
    float *restrict scores = scratch->scores, *restrict sums = scratch->sums, factors[SIDE] ALIGNED;
    for (int64_t unit = begin; unit < end; unit++) {
        /* The last blocks of a causal mask take longest: they come first. */
        const int64_t start = (blocks - 1 - unit % blocks) * SIDE, head = unit / blocks % a->heads;
        const int64_t batch = unit / blocks / a->heads, group = head / (a->heads / a->groups);
        const Ranges ranges = ranges_of(a, batch, start);
        const Block queries = block_of(&a->q, batch, head, start, a->queries, a->width, wide);
        Floats peaks[VECTORS], totals[VECTORS];
        for (int vector = 0; vector < VECTORS; vector++) peaks[vector] = fill(-INFINITY), totals[vector] = fill(0.0f);
        pack_rows(rows, words, &queries, wide);
        transpose(across, SIDE, rows, words, SIDE, words);
        memset(sums, 0, (size_t)(padded * SIDE) * sizeof(float));
        for (int64_t key = ranges.begin / SIDE * SIDE; key < ranges.end; key += SIDE) {
            const Block key_block = block_of(&a->k, batch, group, key, a->keys, a->width, wide);
            const Block value_block = block_of(&a->v, batch, group, key, a->keys, a->width, wide);
            const int masked = is_masked(&ranges, key);
            pack_rows(rows, words, &key_block, wide);
            pack_pairs(values, padded, &value_block, wide);
            multiply(scores, SIDE, rows, words, 1, across, SIDE, padded / step, SIDE, SIDE, 0, wide);
            for (int vector = 0; vector < VECTORS; vector++) {
                float *column = scores + vector * LANES;
                Floats peak = peaks[vector];
                for (int64_t line = 0; line < SIDE; line++) {
                    Floats score = *(Floats *)(column + line * SIDE) * a->scale;
                    if (masked) score = attended(&ranges, vector, key + line, score, -INFINITY);
                    *(Floats *)(column + line * SIDE) = score;
                    peak = larger(score, peak);
                }
                const Ints none = peak == -INFINITY; /* no key yet: exp(-infinity - 0) is 0 */
                const Floats base = (Floats)(~none & (Ints)peak);
                const Floats shrink = exponential(peaks[vector] - base);
                Floats total = {0};
                for (int64_t line = 0; line < SIDE; line += 2) {
                    const Floats even = exponential(*(Floats *)(column + line * SIDE) - base);
                    const Floats odd = exponential(*(Floats *)(column + (line + 1) * SIDE) - base);
                    total += even + odd;
                    *(Words *)(chances + line / step * SIDE + vector * LANES) = paired(even, odd, wide);
                    if (step == 1) *(Floats *)(chances + (line + 1) * SIDE + vector * LANES) = odd;
                }
                totals[vector] = totals[vector] * shrink + total;
                peaks[vector] = peak;
                for (int64_t line = 0; line < padded; line++)
                    *(Floats *)(sums + line * SIDE + vector * LANES) *= shrink;
            }
            multiply(sums, SIDE, values, 1, padded, chances, SIDE, SIDE / step, padded, SIDE, 1, wide);
        }
        for (int vector = 0; vector < VECTORS; vector++)
            *(Floats *)(factors + vector * LANES) = 1.0f / totals[vector];
        store_transposed(&a->out, batch, head, start, a->queries, a->width, sums, factors, wide);
        for (int64_t lane = 0; lane < SIDE && start + lane < a->queries; lane++)
            *log_sum_of(a, batch, head, start + lane) =
                peaks[lane / LANES][lane % LANES] + logf(totals[lane / LANES][lane % LANES]);
    }
}

/* Rows are query heads of all rows of the batch. */
INLINE void attend_backward(const Attention *a, int64_t begin, int64_t end, Scratch *scratch, const int wide) {
    const int64_t padded = a->padded_width, step = per_word(wide);
    const int64_t words = (padded / step + LANES - 1) / LANES * LANES, area = a->padded_keys * padded;
    uint32_t *restrict rows = scratch->rows, *restrict value_rows = scratch->value_rows;
    uint32_t *restrict key_pairs = scratch->key_pairs, *restrict query_pairs = scratch->query_pairs;
    uint32_t *restrict gradient_pairs = scratch->gradient_pairs;
    uint32_t *restrict queries_across = scratch->queries_across, *restrict gradients_across = scratch->gradients_across;
    uint32_t *restrict chances = scratch->chances, *restrict changes = scratch->changes;
    uint32_t *restrict changes_across = scratch->changes_across;
    float *restrict scores = scratch->scores, *restrict products = scratch->products, *restrict sums = scratch->sums;
    float log_sums[SIDE] ALIGNED, along[SIDE] ALIGNED, factors[SIDE] ALIGNED;
    for (int64_t lane = 0; lane < SIDE; lane++) factors[lane] = a->scale;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t head = unit % a->heads, batch = unit / a->heads, group = head / (a->heads / a->groups);
        float *key_sums = a->key_sums + unit * area, *value_sums = a->value_sums + unit * area;
        memset(key_sums, 0, (size_t)area * sizeof(float));
        memset(value_sums, 0, (size_t)area * sizeof(float));
        for (int64_t start = 0; start < a->queries; start += SIDE) {
            const Ranges ranges = ranges_of(a, batch, start);
            const Block queries = block_of(&a->q, batch, head, start, a->queries, a->width, wide);
            const Block gradients = block_of(&a->gradient, batch, head, start, a->queries, a->width, wide);
            const Block outs = block_of(&a->out, batch, head, start, a->queries, a->width, wide);
            pack_rows(rows, words, &queries, wide);
            transpose(queries_across, SIDE, rows, words, SIDE, words);
            pack_rows(rows, words, &gradients, wide);
            transpose(gradients_across, SIDE, rows, words, SIDE, words);
            pack_pairs(query_pairs, padded, &queries, wide);
            pack_pairs(gradient_pairs, padded, &gradients, wide);
            for (int64_t lane = 0; lane < SIDE; lane++) {
                Floats sum = {0};
                for (int64_t at = 0; at < a->width; at += LANES)
                    sum += element(&gradients, lane, at, wide) * element(&outs, lane, at, wide);
                along[lane] = total(sum);
                log_sums[lane] = start + lane < a->queries ? *log_sum_of(a, batch, head, start + lane) : 0.0f;
            }
            memset(sums, 0, (size_t)(padded * SIDE) * sizeof(float));
            for (int64_t key = ranges.begin / SIDE * SIDE; key < ranges.end; key += SIDE) {
                const Block key_block = block_of(&a->k, batch, group, key, a->keys, a->width, wide);
                const Block value_block = block_of(&a->v, batch, group, key, a->keys, a->width, wide);
                const int masked = is_masked(&ranges, key);
                pack_rows(rows, words, &key_block, wide);
                pack_rows(value_rows, words, &value_block, wide);
                pack_pairs(key_pairs, padded, &key_block, wide);
                multiply(scores, SIDE, rows, words, 1, queries_across, SIDE, padded / step, SIDE, SIDE, 0, wide);
                multiply(
                    products, SIDE, value_rows, words, 1, gradients_across, SIDE, padded / step, SIDE, SIDE, 0, wide);
                for (int vector = 0; vector < VECTORS; vector++) {
                    const Floats base = *(Floats *)(log_sums + vector * LANES);
                    const Floats mean = *(Floats *)(along + vector * LANES);
                    for (int64_t line = 0; line < SIDE; line += 2) {
                        Floats change[2];
                        for (int64_t side = 0; side < 2; side++) {
                            const int64_t at = (line + side) * SIDE + vector * LANES;
                            Floats chance = exponential(*(Floats *)(scores + at) * a->scale - base);
                            if (masked) chance = attended(&ranges, vector, key + line + side, chance, 0.0f);
                            change[side] = chance * (*(Floats *)(products + at) - mean);
                            if (step == 1) {
                                *(Floats *)(chances + at) = chance;
                                *(Floats *)(changes + at) = change[side];
                            } else {
                                const Halves p = rounded(chance), ds = rounded(change[side]);
                                memcpy((char *)chances + 2 * at, &p, sizeof p);
                                memcpy((char *)changes + 2 * at, &ds, sizeof ds);
                            }
                        }
                        if (step == 2)
                            *(Words *)(changes_across + line / 2 * SIDE + vector * LANES) =
                                paired(change[0], change[1], wide);
                    }
                }
                float *key_sum = key_sums + key * padded, *value_sum = value_sums + key * padded;
                multiply(
                    value_sum, padded, chances, SIDE / step, 1, gradient_pairs, padded, SIDE / step, SIDE, padded, 1,
                    wide);
                multiply(
                    key_sum, padded, changes, SIDE / step, 1, query_pairs, padded, SIDE / step, SIDE, padded, 1, wide);
                multiply(
                    sums, SIDE, key_pairs, 1, padded, step == 2 ? changes_across : changes, SIDE, SIDE / step, padded,
                    SIDE, 1, wide);
            }
            store_transposed(&a->by_q, batch, head, start, a->queries, a->width, sums, factors, wide);
        }
    }
}

/* Rows are keys of all kv heads of all rows of the batch: adds up the gradients from the query heads of the group. */
INLINE void attend_sums(const Attention *a, int64_t begin, int64_t end, const int wide) {
    const int64_t share = a->heads / a->groups, area = a->padded_keys * a->padded_width;
    for (int64_t row = begin; row < end; row++) {
        const int64_t key = row % a->keys, group = row / a->keys % a->groups, batch = row / a->keys / a->groups;
        const int64_t from = (batch * a->heads + group * share) * area + key * a->padded_width;
        void *by_key = (void *)offset(head_of(&a->by_k, batch, group, wide), key * a->by_k.row, wide);
        void *by_value = (void *)offset(head_of(&a->by_v, batch, group, wide), key * a->by_v.row, wide);
        for (int64_t at = 0; at < a->width; at += LANES) {
            Floats key_sum = {0}, value_sum = {0};
            for (int64_t head = 0; head < share; head++) {
                key_sum += *(Floats *)(a->key_sums + from + head * area + at);
                value_sum += *(Floats *)(a->value_sums + from + head * area + at);
            }
            store(by_key, at, a->width - at, key_sum * a->scale, wide);
            store(by_value, at, a->width - at, value_sum, wide);
        }
    }
}

#else

typedef struct {
    char unused;
} Scratch;

/* Never called: ``has_attention`` says so, and torch's kernel computes. */
INLINE void attend(const Attention *a, int64_t begin, int64_t end, Scratch *scratch, const int wide) {
    (void)a, (void)begin, (void)end, (void)scratch, (void)wide;
}
INLINE void attend_backward(const Attention *a, int64_t begin, int64_t end, Scratch *scratch, const int wide) {
    (void)a, (void)begin, (void)end, (void)scratch, (void)wide;
}
INLINE void attend_sums(const Attention *a, int64_t begin, int64_t end, const int wide) {
    (void)a, (void)begin, (void)end, (void)wide;
}

#endif
