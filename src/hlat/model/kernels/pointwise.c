/* RMSNorm, rotary embedding, SwiGLU and cross-entropy on a CPU, forward and backward, each in one pass over memory.
 *
 * A part of kernels.c. Operands are bf16 or fp32, everything between is fp32 and rounded once.
 * The order of every sum is written out here, in vectors of LANES numbers: 16 with AVX-512, otherwise 8. Work is split
 * into blocks of rows, whose size depends on the shape only, and a block is computed by one thread: so the number of
 * threads changes no bit.
 */
#include "vectors.h"

enum { BLOCK = 512 }; /* elements whose sum is added up before it is added to the total */

/* Rows of a tensor: ``inner`` rows at a stride, and so on ``outer`` times. */
typedef struct {
    const void *data;
    int64_t inner, outer_stride, inner_stride;
} Rows;

INLINE const void *row_of(const Rows *rows, int64_t row, const int wide) {
    const int64_t at = row / rows->inner * rows->outer_stride + row % rows->inner * rows->inner_stride;
    return offset(rows->data, at, wide);
}

typedef struct {
    int64_t width;
    float eps;
    Rows x, gradient;
    const void *weight;
    void *out;
    float *scale;   /* (rows,) */
    float *partial; /* (blocks, width): gradient of the weight from each block of rows */
    int64_t block_rows, blocks;
} Norm;

INLINE void norm(const Norm *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const void *x = row_of(&a->x, row, wide);
        Floats sums = {0};
        for (int64_t block = 0; block < a->width; block += BLOCK) {
            const int64_t stop = block + BLOCK < a->width ? block + BLOCK : a->width;
            Floats part = {0};
            for (int64_t at = block; at < stop; at += LANES) {
                const Floats value = load(x, at, stop - at, wide);
                part += value * value;
            }
            sums += part;
        }
        const float scale = 1.0f / sqrtf(total(sums) / (float)a->width + a->eps);
        a->scale[row] = scale;
        for (int64_t at = 0; at < a->width; at += LANES) {
            const int64_t left = a->width - at;
            const Floats out = load(x, at, left, wide) * scale * load(a->weight, at, left, wide);
            store(a->out, row * a->width + at, left, out, wide);
        }
    }
}

INLINE void norm_backward(const Norm *a, int64_t begin, int64_t end, const int wide) {
    float *partial = a->partial + begin / a->block_rows * a->width;
    memset(partial, 0, (size_t)a->width * sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        const void *x = row_of(&a->x, row, wide), *gradient = row_of(&a->gradient, row, wide);
        const float scale = a->scale[row];
        Floats sums = {0};
        for (int64_t block = 0; block < a->width; block += BLOCK) {
            const int64_t stop = block + BLOCK < a->width ? block + BLOCK : a->width;
            Floats part = {0};
            for (int64_t at = block; at < stop; at += LANES) {
                const int64_t left = stop - at;
                const Floats product = load(gradient, at, left, wide) * (load(x, at, left, wide) * scale);
                store(partial, at, left, load(partial, at, left, 1) + product, 1);
                part += product * load(a->weight, at, left, wide);
            }
            sums += part;
        }
        const float along = total(sums) / (float)a->width;
        for (int64_t at = 0; at < a->width; at += LANES) {
            const int64_t left = a->width - at;
            const Floats normal = load(x, at, left, wide) * scale;
            const Floats weighted = load(gradient, at, left, wide) * load(a->weight, at, left, wide);
            store(a->out, row * a->width + at, left, (weighted - normal * along) * scale, wide);
        }
    }
}

/* Columns begin to end of the sum over all blocks, in their order. */
INLINE void norm_weight(const Norm *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t at = begin; at < end; at += LANES) {
        Floats sum = {0};
        for (int64_t block = 0; block < a->blocks; block++)
            sum += load(a->partial, block * a->width + at, end - at, 1);
        store(a->out, at, end - at, sum, wide);
    }
}

typedef struct {
    int64_t sequence, groups, heads, half; /* heads: of a group; half: pairs of a head */
    int64_t batch_stride, position_stride, group_stride, head_stride;
    int64_t table_batch_stride, table_stride;
    const void *x;
    const float *cos, *sin;
    void *out;
    float direction;
} Rotation;

/* Rows are positions of the batch. */
INLINE void rotate(const Rotation *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const int64_t batch = row / a->sequence, position = row % a->sequence;
        const int64_t table = batch * a->table_batch_stride + position * a->table_stride;
        const int64_t start = batch * a->batch_stride + position * a->position_stride;
        int64_t out = row * a->groups * a->heads * 2 * a->half;
        for (int64_t group = 0; group < a->groups; group++) {
            for (int64_t head = 0; head < a->heads; head++, out += 2 * a->half) {
                const void *x = offset(a->x, start + group * a->group_stride + head * a->head_stride, wide);
                for (int64_t at = 0; at < a->half; at += LANES) {
                    const int64_t left = a->half - at;
                    const Floats first = load(x, at, left, wide), second = load(x, a->half + at, left, wide);
                    const Floats cos = load(a->cos, table + at, left, 1);
                    const Floats sin = load(a->sin, table + at, left, 1) * a->direction;
                    store(a->out, out + at, left, first * cos - second * sin, wide);
                    store(a->out, out + a->half + at, left, second * cos + first * sin, wide);
                }
            }
        }
    }
}

typedef struct {
    int64_t width;
    Rows gate, up, gradient;
    Rows gate_out, up_out; /* gate_out: output of the forward pass, or gradient of gate */
} Gated;

INLINE void swiglu(const Gated *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const void *gate = row_of(&a->gate, row, wide), *up = row_of(&a->up, row, wide);
        void *out = (void *)row_of(&a->gate_out, row, wide);
        for (int64_t at = 0; at < a->width; at += LANES) {
            const int64_t left = a->width - at;
            const Floats x = load(gate, at, left, wide);
            store(out, at, left, x / (1.0f + exponential(-x)) * load(up, at, left, wide), wide);
        }
    }
}

INLINE void swiglu_backward(const Gated *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const void *gate = row_of(&a->gate, row, wide), *up = row_of(&a->up, row, wide);
        const void *gradient = row_of(&a->gradient, row, wide);
        void *gate_out = (void *)row_of(&a->gate_out, row, wide), *up_out = (void *)row_of(&a->up_out, row, wide);
        for (int64_t at = 0; at < a->width; at += LANES) {
            const int64_t left = a->width - at;
            const Floats x = load(gate, at, left, wide), grad = load(gradient, at, left, wide);
            const Floats sigmoid = 1.0f / (1.0f + exponential(-x));
            const Floats by_gate = sigmoid * (1.0f + x * (1.0f - sigmoid));
            store(up_out, at, left, grad * (x * sigmoid), wide);
            store(gate_out, at, left, grad * load(up, at, left, wide) * by_gate, wide);
        }
    }
}

typedef struct {
    int64_t width;
    void *logits;        /* (rows, width) */
    const int64_t *rows; /* column of each row's label; outside of 0 .. width - 1 if there is none here */
    float *peak, *sum, *label;
    const float *factor;
    int64_t *first;
} Loss;

/* Largest logit, sum of the exponentials relative to it, and logit of the label (0 without) of each row. Sums of rows
 * with a NaN are NaN; those of rows of -infinity only are 0. */
INLINE void loss_sums(const Loss *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const void *logits = offset(a->logits, row * a->width, wide);
        const int64_t label = a->rows[row];
        Floats peaks = fill(-INFINITY), sums = {0};
        for (int64_t at = 0; at < a->width; at += LANES) {
            Floats value = load(logits, at, a->width - at, wide);
            for (int64_t lane = a->width - at; lane < LANES; lane++) value[lane] = -INFINITY;
            peaks = larger(value, peaks);
        }
        const float peak = largest(peaks), base = peak == -INFINITY ? 0.0f : peak;
        for (int64_t block = 0; block < a->width; block += BLOCK) {
            const int64_t stop = block + BLOCK < a->width ? block + BLOCK : a->width;
            Floats part = {0};
            for (int64_t at = block; at < stop; at += LANES) {
                Floats value = exponential(load(logits, at, stop - at, wide) - base);
                for (int64_t lane = stop - at; lane < LANES; lane++) value[lane] = 0.0f;
                part += value;
            }
            sums += part;
        }
        a->peak[row] = peak;
        a->sum[row] = total(sums);
        a->label[row] = label >= 0 && label < a->width ? load(logits, label, 1, wide)[0] : 0.0f;
    }
}

/* Column of the first logit of each row that equals the peak; ``width`` if none does. */
INLINE void first_equal(const Loss *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        const void *logits = offset(a->logits, row * a->width, wide);
        const Floats peak = fill(a->peak[row]);
        int64_t found = a->width;
        for (int64_t at = 0; at < a->width && found == a->width; at += LANES) {
            const Ints equal = load(logits, at, a->width - at, wide) == peak;
            if (!any(equal)) continue;
            for (int64_t lane = 0; lane < LANES && at + lane < a->width; lane++)
                if (equal[lane] && found == a->width) found = at + lane;
        }
        a->first[row] = found;
    }
}

/* Replaces each row by exp(logit - peak) * factor, less 1 at its label. */
INLINE void loss_gradient(const Loss *a, int64_t begin, int64_t end, const int wide) {
    for (int64_t row = begin; row < end; row++) {
        void *logits = (void *)offset(a->logits, row * a->width, wide);
        const int64_t label = a->rows[row];
        const int here = label >= 0 && label < a->width;
        const float peak = a->peak[row], factor = a->factor[row];
        const Floats at_label = here ? load(logits, label, 1, wide) : (Floats){0};
        for (int64_t at = 0; at < a->width; at += LANES) {
            const int64_t left = a->width - at;
            store(logits, at, left, exponential(load(logits, at, left, wide) - peak) * factor, wide);
        }
        if (here) store(logits, label, 1, exponential(at_label - peak) * factor - 1.0f, wide);
    }
}
