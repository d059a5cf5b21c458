/* The kernels of a CPU as one library: what it exports, and the threads that run it.
 *
 * Compiled by hlat/model/kernels/library.py.
 */
#include "vectors.h"

#include "pointwise.c"

#include "attention.c"

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
EXPORT(first_equal, Loss)
EXPORT(attend, Attention)
EXPORT(attend_backward, Attention)
EXPORT(attend_sums, Attention)
