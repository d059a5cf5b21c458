/* AdamW update of bf16 weights on a CPU, and sums of squares of their gradients; reproduces, bit for bit, the update
 * of hlat/optim/adamw_reference.py and the sums of hlat/optim/cpu_kernels.py, which define them.
 *
 * Compiled by hlat/optim/cpu_kernels.py without contraction of products and sums, or any other option that changes the
 * result of an operation. Every update function updates the lines begin <= line < end of one parameter.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    float decay, step_size, one_minus_beta1, beta2, one_minus_beta2, inverse_bias2, eps, gradient_scale;
} Scalars;

enum { STOCHASTIC, NEAREST, KAHAN, NEAREST_LONG, KAHAN_LONG };

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float widen(uint16_t stored) {
    const uint32_t bits = (uint32_t)stored << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* hlat.precision.stochastic_round */
INLINE uint16_t stochastic(float value, uint32_t random16) {
    const uint32_t bits = bits_of(value);
    const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu); /* signed: AVX2 has no other comparison */
    const uint32_t raised = bits + (magnitude < 0x7F7F0000 ? random16 : 0u);
    return (uint16_t)((magnitude > 0x7F800000 ? 0x7FC00000u : raised) >> 16);
}

INLINE uint16_t nearest(float value) {
    const uint32_t bits = bits_of(value);
    const int32_t magnitude = (int32_t)(bits & 0x7FFFFFFFu);
    const uint32_t raised = bits + 0x7FFFu + ((bits >> 16) & 1u);
    return (uint16_t)((magnitude > 0x7F800000 ? 0x7FC00000u : raised) >> 16);
}

INLINE uint32_t rotate(uint32_t word, int count) { return (word << count) | (word >> (32 - count)); }

#define ROUND(count) first += second, second = rotate(second, count) ^ first;
#define INJECT(a, b, number) first += (a), second += (b) + number;
#define THREEFRY                                                                                                       \
    ROUND(13) ROUND(15) ROUND(26) ROUND(6) INJECT(key1, key2, 1u)                                                      \
    ROUND(17) ROUND(29) ROUND(16) ROUND(24) INJECT(key2, key0, 2u)                                                     \
    ROUND(13) ROUND(15) ROUND(26) ROUND(6) INJECT(key0, key1, 3u)                                                      \
    ROUND(17)

/* hlat.precision.line_bits, from the random word of a line */
INLINE uint32_t line_bits(uint32_t word, uint32_t column) { return (word + column * 0x9E3779B9u) >> 16; }

INLINE void update(
    const int mode, const int wide_gradient, int64_t begin, int64_t end, int64_t length,
    uint16_t *__restrict__ weight, const void *__restrict__ gradient, uint16_t *__restrict__ exp_avg,
    uint16_t *__restrict__ exp_avg_sq, uint16_t *__restrict__ compensation, const Scalars *scalars,
    const uint32_t *rows, const uint32_t *columns, const int32_t *names, const uint32_t *keys, int64_t name_count) {
    const Scalars s = *scalars;
    const uint16_t *narrow = (const uint16_t *)gradient;
    const float *wide = (const float *)gradient;
    const int random = mode == STOCHASTIC || mode == NEAREST_LONG || mode == KAHAN_LONG;
    const int compensated = mode == KAHAN || mode == KAHAN_LONG;
    for (int64_t line = begin; line < end; line++) {
        const uint32_t key0 = random || compensated ? keys[names[line]] : 0u;
        const uint32_t key1 = random || compensated ? keys[name_count + names[line]] : 0u;
        const uint32_t key2 = key0 ^ key1 ^ 0x1BD11BDAu;
        const uint32_t start0 = columns[line] + key0, start1 = rows[line] + key1;
        const int64_t offset = line * length;
        uint32_t of_line = 0u; /* of column -1, which no element has */
        if (compensated) {
            uint32_t first = key0 - 1u, second = start1;
            THREEFRY
            of_line = first;
        }
#pragma omp simd
        for (int64_t index = 0; index < length; index++) {
            const int64_t at = offset + index;
            const float w = widen(weight[at]), unscaled = wide_gradient ? wide[at] : widen(narrow[at]);
            const float scaled = unscaled * s.gradient_scale;
            const float g = wide_gradient ? scaled : widen(nearest(scaled));
            const float m_old = widen(exp_avg[at]), v_old = widen(exp_avg_sq[at]);
            const float m = m_old + (g - m_old) * s.one_minus_beta1;
            const float v = v_old * s.beta2 + (g * g) * s.one_minus_beta2;
            const float denominator = sqrtf(v) * s.inverse_bias2 + s.eps;
            const float change = w * s.decay + (m / denominator) * s.step_size;
            if (random) { /* Threefry-2x32-13 */
                uint32_t first = start0 + (uint32_t)index, second = start1;
                THREEFRY
                exp_avg[at] = stochastic(m, first >> 16);
                exp_avg_sq[at] = stochastic(v, second & 0xFFFFu);
                if (mode == STOCHASTIC) {
                    weight[at] = stochastic(w - change, first & 0xFFFFu);
                    continue;
                }
            } else {
                exp_avg[at] = nearest(m);
                exp_avg_sq[at] = nearest(v);
            }
            if (mode == NEAREST || mode == NEAREST_LONG) {
                weight[at] = nearest(w - change);
            } else {
                const float y = widen(compensation[at]) - change;
                const uint16_t rounded = nearest(w + y);
                const uint32_t random16 = line_bits(of_line, columns[line] + (uint32_t)index);
                compensation[at] = stochastic(y - (widen(rounded) - w), random16);
                weight[at] = rounded;
            }
        }
    }
}

#define EXPORT(name, mode, wide)                                                                                       \
    void name(                                                                                                         \
        int64_t begin, int64_t end, int64_t length, void *weight, const void *gradient, void *exp_avg,                 \
        void *exp_avg_sq, void *compensation, const void *scalars, const void *rows, const void *columns,              \
        const void *names, const void *keys, int64_t name_count) {                                                     \
        update(mode, wide, begin, end, length, (uint16_t *)weight, gradient, (uint16_t *)exp_avg,                      \
               (uint16_t *)exp_avg_sq, (uint16_t *)compensation, (const Scalars *)scalars, (const uint32_t *)rows,     \
               (const uint32_t *)columns, (const int32_t *)names, (const uint32_t *)keys, name_count);                 \
    }

EXPORT(stochastic_bf16, STOCHASTIC, 0)
EXPORT(stochastic_fp32, STOCHASTIC, 1)
EXPORT(nearest_bf16, NEAREST, 0)
EXPORT(nearest_fp32, NEAREST, 1)
EXPORT(kahan_bf16, KAHAN, 0)
EXPORT(kahan_fp32, KAHAN, 1)
EXPORT(nearest_long_bf16, NEAREST_LONG, 0)
EXPORT(nearest_long_fp32, NEAREST_LONG, 1)
EXPORT(kahan_long_bf16, KAHAN_LONG, 0)
EXPORT(kahan_long_fp32, KAHAN_LONG, 1)

enum { RUN = 256, LANES = 16 };

/* Sum the squares of the runs begin <= run < end of a tensor of count elements; the last run may be shorter. */
void square_sums(int64_t begin, int64_t end, int64_t count, const void *tensor, double *sums) {
    for (int64_t run = begin; run < end; run++) {
        const uint16_t *values = (const uint16_t *)tensor + run * RUN;
        uint16_t last[RUN];
        if (count - run * RUN < RUN) {
            memset(last, 0, sizeof last);
            memcpy(last, values, (size_t)(count - run * RUN) * sizeof *last);
            values = last;
        }
        double lanes[LANES] = {0.0};
        for (int row = 0; row < RUN; row += LANES) {
#pragma omp simd
            for (int lane = 0; lane < LANES; lane++) {
                const double value = (double)widen(values[row + lane]);
                lanes[lane] += value * value;
            }
        }
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        sums[run] = lanes[0];
    }
}
