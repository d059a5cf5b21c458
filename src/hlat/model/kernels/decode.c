/* A decoding step on a CPU with AVX-512 or AVX2: one new token of each row through all blocks and the final norm.
 *
 * Compiled by hlat/model/decoding.py. Phases follow each other, threads share each of them:
 *
 *     x -> [norm] -> q, k, v -> [norms of queries and keys] -> rotated, k and v into the cache -> attention -> output
 *       -> [norm] -> + -> [norm] -> silu(gate) up -> down -> [norm] -> + -> ... -> norm
 *
 * A step reads every weight once, for few rows, so that memory limits it: matrices are read as they are stored, (out,
 * in), in order. Numbers are rounded to the dtype where torch's operations round them: after each product, norm and
 * sum. Everything between is fp32. Each number of a product is a sum of LANES sums in the order of the columns, for any
 * number of rows and threads; so neither changes a bit.
 */
#include "threads.h"

#include "few_rows.h"

typedef struct {
    const void *before_attention, *after_attention, *before_feed_forward, *after_feed_forward; /* norms; null: none */
    const void *q_norm, *k_norm;             /* null: none */
    const void *qkv[3], *qkv_bias[3];        /* as many as ``parts``; bias null: none */
    const void *output, *gate, *up, *down;
} Layer;

typedef struct {
    int64_t layers, rows, width, heads, groups, head_width, inner;
    int64_t parts, part_rows[3], qkv_rows;        /* matrices of q, k, v, their rows, and all of them together */
    int64_t q_step, k_start, v_start, kv_step;    /* columns of q, k, v: first head, and from group to group */
    int64_t gate_block, gate_step;                /* rows of gate that follow each other, and to the next ones */
    int64_t whole_norms;                          /* norms of q and k over all heads; otherwise of each head */
    int64_t table_step;                           /* from row to row of cos and sin: 0 if rows have the same angles */
    int64_t layer_step, value_step, row_step, head_step; /* of the cache, in elements */
    int64_t place, first;                         /* of the new token in the cache; of the first one it attends to */
    float eps, scale;
    const Layer *layer;
    const void *final_norm;
    const float *cos, *sin;
    const uint8_t *mask; /* (rows, place + 1): 1 for positions to attend to; null: all from ``first`` */
    void *x, *hidden, *qkv, *attended, *gated, *cache;
} Step;

#ifdef HAS_VECTORS

enum { KEYS = 256, BLOCK_BYTES = 1 << 16 }; /* keys of a block; bytes of weights that a thread takes */

/* Norm over segments of a row, all of one width. */
INLINE void norm_segments(
    void *to, const void *from, int64_t segments, int64_t step, int64_t width, const void *weight, float eps,
    const int wide) {
    Floats sums = {0};
    for (int64_t segment = 0; segment < segments; segment++)
        for (int64_t at = 0; at < width; at += LANES) {
            const Floats x = load(offset(from, segment * step, wide), at, width - at, wide);
            sums += x * x;
        }
    const float scale = 1.0f / sqrtf(sum_of(sums) / (float)(segments * width) + eps);
    for (int64_t segment = 0; segment < segments; segment++)
        for (int64_t at = 0; at < width; at += LANES) {
            const int64_t here = segment * step + at, left = width - at;
            const Floats x = load(from, here, left, wide) * scale;
            store(to, here, left, x * load(weight, segment * width + at, left, wide), wide);
        }
}

typedef struct {
    const Step *step;
    const Layer *layer;
    int64_t index;
    const void *weight, *from, *added; /* of ``norm_rows``: out = norm(from), or out = added + norm(from) */
    void *to;
} Phase;

INLINE void norm_rows(const Phase *a, int64_t begin, int64_t end, const int wide) {
    const int64_t width = a->step->width;
    for (int64_t row = begin; row < end; row++) {
        void *to = (void *)offset(a->to, row * width, wide);
        const void *from = offset(a->from, row * width, wide), *added = offset(a->added, row * width, wide);
        norm_segments(a->added ? (void *)from : to, from, 1, 0, width, a->weight, a->step->eps, wide);
        if (!a->added) continue;
        for (int64_t at = 0; at < width; at += LANES)
            store(to, at, width - at, load(added, at, width - at, wide) + load(from, at, width - at, wide), wide);
    }
}

/* Norms over all query heads and over all key heads of a row. */
INLINE void norm_heads(const Phase *a, int64_t begin, int64_t end, const int wide) {
    const Step *s = a->step;
    for (int64_t row = begin; row < end; row++) {
        void *q = (void *)offset(s->qkv, row * s->qkv_rows, wide), *k = (void *)offset(q, s->k_start, wide);
        const int64_t queries = s->heads / s->groups * s->head_width;
        norm_segments(q, q, s->groups, s->q_step, queries, a->layer->q_norm, s->eps, wide);
        norm_segments(k, k, s->groups, s->kv_step, s->head_width, a->layer->k_norm, s->eps, wide);
    }
}

INLINE void rotate_head(void *x, const float *cos, const float *sin, int64_t half, const int wide) {
    for (int64_t at = 0; at < half; at += LANES) {
        const int64_t left = half - at;
        const Floats first = load(x, at, left, wide), second = load(x, half + at, left, wide);
        const Floats c = load(cos, at, left, 1), s = load(sin, at, left, 1);
        store(x, at, left, first * c - second * s, wide);
        store(x, half + at, left, second * c + first * s, wide);
    }
}

/* Softmax attention of ``count`` heads, TILE at most, of one row to the keys and values of their group. */
INLINE void attend_heads(
    const Step *s, const void *q, const void *keys, const void *values, const uint8_t *mask, void *out, const int count,
    const int wide) {
    const int64_t width = s->head_width, total = s->place + 1;
    float wide_q[TILE][WIDEST] ALIGNED, sums[TILE][WIDEST] ALIGNED, chances[TILE][KEYS] ALIGNED;
    float peaks[TILE], totals[TILE];
    for (int head = 0; head < count; head++) {
        peaks[head] = -INFINITY, totals[head] = 0.0f;
        for (int64_t at = 0; at < width; at += LANES) {
            *(Floats *)(wide_q[head] + at) = load(q, head * width + at, width - at, wide) * s->scale;
            *(Floats *)(sums[head] + at) = (Floats){0};
        }
    }
    for (int64_t start = s->first; start < total; start += KEYS) {
        const int64_t here = total - start < KEYS ? total - start : KEYS;
        for (int64_t key = 0; key < here; key++) {
            Floats products[TILE];
#pragma GCC unroll 4
            for (int head = 0; head < count; head++) products[head] = (Floats){0};
            for (int64_t at = 0; at < width; at += LANES) {
                const Floats column = load(keys, (start + key) * width + at, width - at, wide);
#pragma GCC unroll 4
                for (int head = 0; head < count; head++) products[head] += column * *(Floats *)(wide_q[head] + at);
            }
            const int attended = !mask || mask[start + key];
#pragma GCC unroll 4
            for (int head = 0; head < count; head++)
                chances[head][key] = attended ? sum_of(products[head]) : -INFINITY;
        }
        for (int head = 0; head < count; head++) {
            float *scores = chances[head];
            for (int64_t key = here; key % LANES; key++) scores[key] = -INFINITY;
            Floats highest = fill(peaks[head]), added = {0};
            for (int64_t key = 0; key < here; key += LANES) highest = larger(*(Floats *)(scores + key), highest);
            const float peak = largest(highest), base = peak == -INFINITY ? 0.0f : peak;
            const float shrink = exponential(fill(peaks[head] - base))[0];
            for (int64_t key = 0; key < here; key += LANES) {
                const Floats chance = exponential(*(Floats *)(scores + key) - base);
                *(Floats *)(scores + key) = chance;
                added += chance;
            }
            totals[head] = totals[head] * shrink + sum_of(added);
            peaks[head] = peak;
            for (int64_t at = 0; at < width; at += LANES) *(Floats *)(sums[head] + at) *= shrink;
        }
        for (int64_t at = 0; at < width; at += LANES) {
            Floats parts[TILE];
#pragma GCC unroll 4
            for (int head = 0; head < count; head++) parts[head] = *(Floats *)(sums[head] + at);
            for (int64_t key = 0; key < here; key++) {
                const Floats value = load(values, (start + key) * width + at, width - at, wide);
#pragma GCC unroll 4
                for (int head = 0; head < count; head++) parts[head] += value * chances[head][key];
            }
#pragma GCC unroll 4
            for (int head = 0; head < count; head++) *(Floats *)(sums[head] + at) = parts[head];
        }
    }
    for (int head = 0; head < count; head++)
        for (int64_t at = 0; at < width; at += LANES)
            store(out, head * width + at, width - at, *(Floats *)(sums[head] + at) / totals[head], wide);
}

/* Rows are kv heads of all rows: norms of their queries and keys, rotation, cache, attention. */
INLINE void attend_cached(const Phase *a, int64_t begin, int64_t end, const int wide) {
    const Step *s = a->step;
    const int64_t share = s->heads / s->groups, width = s->head_width;
    for (int64_t unit = begin; unit < end; unit++) {
        const int64_t row = unit / s->groups, group = unit % s->groups;
        const void *fused = offset(s->qkv, row * s->qkv_rows, wide);
        void *q = (void *)offset(fused, group * s->q_step, wide);
        void *k = (void *)offset(fused, s->k_start + group * s->kv_step, wide);
        const void *v = offset(fused, s->v_start + group * s->kv_step, wide);
        const float *cos = s->cos + row * s->table_step, *sin = s->sin + row * s->table_step;
        for (int64_t head = 0; head < share; head++) {
            void *here = (void *)offset(q, head * width, wide);
            if (a->layer->q_norm && !s->whole_norms)
                norm_segments(here, here, 1, 0, width, a->layer->q_norm, s->eps, wide);
            rotate_head(here, cos, sin, width / 2, wide);
        }
        if (a->layer->k_norm && !s->whole_norms) norm_segments(k, k, 1, 0, width, a->layer->k_norm, s->eps, wide);
        rotate_head(k, cos, sin, width / 2, wide);
        const int64_t cached = a->index * s->layer_step + row * s->row_step + group * s->head_step;
        const void *keys = offset(s->cache, cached, wide), *values = offset(keys, s->value_step, wide);
        const size_t bytes = (size_t)width * (wide ? 4 : 2);
        memcpy((void *)offset(keys, s->place * width, wide), k, bytes);
        memcpy((void *)offset(values, s->place * width, wide), v, bytes);
        const uint8_t *mask = s->mask ? s->mask + row * (s->place + 1) : 0;
        void *out = (void *)offset(s->attended, (row * s->heads + group * share) * width, wide);
        for (int64_t head = 0; head < share;) {
            const void *here = offset(q, head * width, wide);
            void *to = (void *)offset(out, head * width, wide);
            const int64_t left = share - head;
            if (left >= 4) attend_heads(s, here, keys, values, mask, to, 4, wide), head += 4;
            else if (left >= 2) attend_heads(s, here, keys, values, mask, to, 2, wide), head += 2;
            else attend_heads(s, here, keys, values, mask, to, 1, wide), head += 1;
        }
    }
}

EXPORT(multiply_rows, Product)
EXPORT(norm_rows, Phase)
EXPORT(norm_heads, Phase)
EXPORT(attend_cached, Phase)

typedef struct {
    Kernel multiply_rows, norm_rows, norm_heads, attend_cached;
} Phases;

typedef struct {
    Parallel parallel;
    int64_t threads;
    const Phases *phases;
} Team;

INLINE void share_product(
    const Team *team, const Step *s, Product product, int64_t in, int64_t outs, const void *x, void *out,
    const void *added, const int wide) {
    product.in = product.x_row = in, product.outs = outs, product.rows = s->rows, product.x = x, product.out = out;
    product.added = added;
    if (!product.out_row) product.out_row = outs;
    if (!product.block) product.block = product.step = outs;
    const int64_t units = (product.block + LANES - 1) / LANES * (outs / product.block);
    const int64_t unit_bytes = in * LANES * (wide ? 4 : 2);
    const int64_t together = BLOCK_BYTES / unit_bytes ? BLOCK_BYTES / unit_bytes : 1;
    run(team->parallel, team->threads, team->phases->multiply_rows, &product, units, together);
}

INLINE void normalise(const Team *team, const Step *s, const void *weight, const void *from, void *to, void *added) {
    const Phase phase = {.step = s, .weight = weight, .from = from, .to = to, .added = added};
    const int64_t together = BLOCK_BYTES / 4 / s->width ? BLOCK_BYTES / 4 / s->width : 1;
    run(team->parallel, team->threads, team->phases->norm_rows, &phase, s->rows, together);
}

/* Adds the product by a matrix, normalised if there is a norm, to the residual stream. */
INLINE void add_product(
    const Team *team, const Step *s, const void *matrix, int64_t in, const void *from, const void *norm,
    const int wide) {
    void *to = norm ? s->hidden : s->x;
    share_product(team, s, (Product){.weight = matrix}, in, s->width, from, to, norm ? 0 : s->x, wide);
    if (norm) normalise(team, s, norm, s->hidden, s->x, s->x);
}

INLINE const void *input(const Team *team, const Step *s, const void *norm) {
    if (!norm) return s->x;
    normalise(team, s, norm, s->x, s->hidden, 0);
    return s->hidden;
}

INLINE void decode(Parallel parallel, int64_t threads, const Step *s, const Phases *phases, const int wide) {
    const Team whole = {parallel, threads, phases}, *team = &whole;
    for (int64_t index = 0; index < s->layers; index++) {
        const Layer *layer = s->layer + index;
        const Phase phase = {.step = s, .layer = layer, .index = index};
        const void *in = input(team, s, layer->before_attention);
        for (int64_t part = 0, column = 0; part < s->parts; column += s->part_rows[part++]) {
            const Product qkv = {
                .weight = layer->qkv[part], .bias = layer->qkv_bias[part], .out_row = s->qkv_rows};
            void *out = (void *)offset(s->qkv, column, wide);
            share_product(team, s, qkv, s->width, s->part_rows[part], in, out, 0, wide);
        }
        if (s->whole_norms) run(parallel, threads, phases->norm_heads, &phase, s->rows, 4);
        run(parallel, threads, phases->attend_cached, &phase, s->rows * s->groups, 1);
        add_product(team, s, layer->output, s->heads * s->head_width, s->attended, layer->after_attention, wide);
        in = input(team, s, layer->before_feed_forward);
        const Product gated = {
            .weight = layer->gate, .up = layer->up, .block = s->gate_block, .step = s->gate_step};
        share_product(team, s, gated, s->width, s->inner, in, s->gated, 0, wide);
        add_product(team, s, layer->down, s->inner, s->gated, layer->after_feed_forward, wide);
    }
    normalise(team, s, s->final_norm, s->x, s->x, 0);
}

#define DECODE(suffix, wide)                                                                                           \
    void decode_##suffix(Parallel parallel, int64_t threads, const Step *step) {                                       \
        const Phases phases = {                                                                                        \
            multiply_rows_##suffix, norm_rows_##suffix, norm_heads_##suffix, attend_cached_##suffix};                  \
        decode(parallel, threads, step, &phases, wide);                                                                \
    }

int64_t lanes(void) { return LANES; }

DECODE(bf16, 0)
DECODE(fp32, 1)

#else
#error "AVX-512 or AVX2 is needed"
#endif
