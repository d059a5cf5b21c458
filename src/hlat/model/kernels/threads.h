/* Threads that run the kernels of this folder, and the names under which a library exports a kernel of both dtypes. */
#ifndef HLAT_THREADS_H
#define HLAT_THREADS_H
#include <stdint.h>

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

#define EXPORT(name, Arguments)                                                                                        \
    void name##_bf16(const void *arguments, int64_t begin, int64_t end) {                                              \
        name((const Arguments *)arguments, begin, end, 0);                                                             \
    }                                                                                                                  \
    void name##_fp32(const void *arguments, int64_t begin, int64_t end) {                                              \
        name((const Arguments *)arguments, begin, end, 1);                                                             \
    }

#endif
