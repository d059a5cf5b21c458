/* Threads that run the kernels of this folder, and the names under which a library exports a kernel of both dtypes. */
#ifndef HLAT_THREADS_H
#define HLAT_THREADS_H
#include <stdint.h>

/* Threads of an OpenMP library take blocks of rows until none is left. Large arrays of a kernel are in memory that the
 * caller allocates for each thread: a thread's stack may have 256 KiB (OMP_STACKSIZE, ulimit -s). */
typedef void (*Kernel)(const void *arguments, int64_t begin, int64_t end, void *scratch);
typedef void (*Parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

typedef struct {
    Kernel kernel;
    const void *arguments;
    int64_t rows, block_rows, next;
    char *scratch;
    int64_t scratch_bytes, threads; /* of a thread; threads that have come so far */
} Task;

static void take_blocks(void *data) {
    Task *task = data;
    char *scratch = task->scratch + __atomic_fetch_add(&task->threads, 1, __ATOMIC_RELAXED) * task->scratch_bytes;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&task->next, task->block_rows, __ATOMIC_RELAXED);
        if (begin >= task->rows) return;
        const int64_t end = begin + task->block_rows;
        task->kernel(task->arguments, begin, end < task->rows ? end : task->rows, scratch);
    }
}

void run_with_scratch(
    Parallel parallel, int64_t threads, Kernel kernel, const void *arguments, int64_t rows, int64_t block_rows,
    char *scratch, int64_t scratch_bytes) {
    Task task = {kernel, arguments, rows, block_rows, 0, scratch, scratch_bytes, 0};
    const int64_t blocks = (rows + block_rows - 1) / block_rows;
    if (threads > 1 && blocks > 1) /* all threads: a library that is asked for fewer ends the others */
        parallel(take_blocks, &task, (unsigned)threads, 0);
    else
        take_blocks(&task);
}

void run(
    Parallel parallel, int64_t threads, Kernel kernel, const void *arguments, int64_t rows, int64_t block_rows) {
    run_with_scratch(parallel, threads, kernel, arguments, rows, block_rows, 0, 0);
}

#define EXPORT_AS(name, Arguments, ...)                                                                                \
    void name##_bf16(const void *arguments, int64_t begin, int64_t end, void *scratch) {                               \
        (void)scratch, name((const Arguments *)arguments, begin, end, __VA_ARGS__ 0);                                  \
    }                                                                                                                  \
    void name##_fp32(const void *arguments, int64_t begin, int64_t end, void *scratch) {                               \
        (void)scratch, name((const Arguments *)arguments, begin, end, __VA_ARGS__ 1);                                  \
    }
#define EXPORT(name, Arguments) EXPORT_AS(name, Arguments, )
#define EXPORT_WITH_SCRATCH(name, Arguments) EXPORT_AS(name, Arguments, scratch, )

#endif
