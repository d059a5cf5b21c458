/* RMSNorm, rotary embedding, SwiGLU and cross-entropy on a CPU, forward and backward, each in one pass over memory.
 *
 * Compiled by hlat/model/kernels/library.py. Operands are bf16 or fp32, everything between is fp32 and rounded once.
 * The order of every sum is written out here, in vectors of LANES numbers whatever the vectors of the processor. Work
 * is split into blocks of rows, whose size depends on the shape only, and a block is computed by one thread: so the
 * number of threads changes no bit.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, BLOCK = 512 }; /* BLOCK: elements whose sum is added up before it is added to the total */

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

INLINE Floats fill(float value) { return value - (Floats){0}; }

/* What GCC and Clang do not translate to single AVX-512 instructions from the definitions for all processors. */
#ifdef __AVX512F__

INLINE Floats at_least(float bound, Floats x) { return (Floats)_mm512_max_ps((__m512)fill(bound), (__m512)x); }
INLINE Floats at_most(float bound, Floats x) { return (Floats)_mm512_min_ps((__m512)fill(bound), (__m512)x); }
INLINE Floats larger(Floats x, Floats y) { return (Floats)_mm512_max_ps((__m512)x, (__m512)y); }
INLINE Floats times_power(Floats x, Floats shifted, Floats n) {
    (void)shifted;
    return (Floats)_mm512_scalef_ps((__m512)x, (__m512)n);
}
INLINE Words widen(Halves stored) { return (Words)_mm512_cvtepu16_epi32((__m256i)stored); }
INLINE Halves narrow(Words words) { return (Halves)_mm512_cvtepi32_epi16((__m512i)words); }

#else

INLINE Floats choose(Ints condition, Floats yes, Floats no) {
    return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no));
}

/* NaN for NaN. */
INLINE Floats at_least(float bound, Floats x) { return choose(x < bound, fill(bound), x); }
INLINE Floats at_most(float bound, Floats x) { return choose(x > bound, fill(bound), x); }

/* y if one is NaN. */
INLINE Floats larger(Floats x, Floats y) { return choose(x > y, x, y); }

/* x 2^n. The low bits of ``shifted`` are n. Two factors: 2^n alone need not be a normal number. */
INLINE Floats times_power(Floats x, Floats shifted, Floats n) {
    (void)n;
    const Ints power = (Ints)shifted - 0x4B400000, first = power >> 1, second = power - first;
    return x * (Floats)((first + 127) << 23) * (Floats)((second + 127) << 23);
}
INLINE Words widen(Halves stored) { return __builtin_convertvector(stored, Words); }
INLINE Halves narrow(Words words) { return __builtin_convertvector(words, Halves); }

#endif

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

/* Threads of an OpenMP library take blocks of rows until none is left. */
typedef void (*Kernel)(const void *arguments, int64_t begin, int64_t end);
typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    Kernel kernel;
    const void *arguments;
    int64_t rows, block_rows, next;
} Task;

static void take_blocks(void *data) {
    Task *task = data;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&task->next, task->block_rows, __ATOMIC_RELAXED);
        if (begin >= task->rows) return;
        const int64_t end = begin + task->block_rows;
        task->kernel(task->arguments, begin, end < task->rows ? end : task->rows);
    }
}

void run(
    Parallel parallel, int64_t threads, Kernel kernel, const void *arguments, int64_t rows, int64_t block_rows) {
    Task task = {kernel, arguments, rows, block_rows, 0};
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    if (threads > 1 && blocks > 1) /* all threads: a library that is asked for fewer ends the others */
        parallel(take_blocks, &task, (unsigned)threads, 0);
    else
        take_blocks(&task);
}

/* What the bits of results depend on beside this file: who compiled it, for which instructions. */
#ifdef __clang__
#define COMPILER __VERSION__ /* with its name */
#else
#define COMPILER "gcc " __VERSION__
#endif
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define INSTRUCTIONS "avx512-bf16"
#elif defined(__AVX512F__)
#define INSTRUCTIONS "avx512"
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define INSTRUCTIONS "fma"
#else
#define INSTRUCTIONS "no fma"
#endif

const char *build(void) { return COMPILER ", " INSTRUCTIONS; }

#define EXPORT(name, Arguments)                                                                                        \
    void name##_bf16(const void *arguments, int64_t begin, int64_t end) {                                              \
        name((const Arguments *)arguments, begin, end, 0);                                                             \
    }                                                                                                                  \
    void name##_fp32(const void *arguments, int64_t begin, int64_t end) {                                              \
        name((const Arguments *)arguments, begin, end, 1);                                                             \
    }

EXPORT(norm, Norm)
EXPORT(norm_backward, Norm)
EXPORT(norm_weight, Norm)
EXPORT(rotate, Rotation)
EXPORT(swiglu, Gated)
EXPORT(swiglu_backward, Gated)
EXPORT(loss_sums, Loss)
EXPORT(loss_gradient, Loss)
