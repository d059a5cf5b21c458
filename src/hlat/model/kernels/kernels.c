/* The kernels of a CPU as one library: what it exports, and the threads that run it.
 *
 * Compiled by hlat/model/kernels/library.py.
 */
#include "threads.h"
#include "vectors.h"

#include "pointwise.c"

#include "attention.c"

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
#elif defined(HAS_VECTORS)
#define INSTRUCTIONS "avx2"
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define INSTRUCTIONS "fma"
#else
#define INSTRUCTIONS "no fma"
#endif

const char *build(void) { return COMPILER ", " INSTRUCTIONS; }

/* Attention needs the instructions that instructions.h is written for: a compiler that is told not to use them leaves
 * it out. */
int has_attention(void) {
#ifdef HAS_VECTORS
    return 1;
#else
    return 0;
#endif
}

/* Memory that attention needs for each thread. */
int64_t scratch_bytes(void) { return sizeof(Scratch); }

EXPORT(norm, Norm)
EXPORT(norm_backward, Norm)
EXPORT(norm_weight, Norm)
EXPORT(rotate, Rotation)
EXPORT(swiglu, Gated)
EXPORT(swiglu_backward, Gated)
EXPORT(loss_sums, Loss)
EXPORT(loss_gradient, Loss)
EXPORT(first_equal, Loss)
EXPORT_WITH_SCRATCH(attend, Attention)
EXPORT_WITH_SCRATCH(attend_backward, Attention)
EXPORT(attend_sums, Attention)
