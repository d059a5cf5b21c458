/* A CUDA runtime without a driver, preloaded into a process: it records in $SHIM_LOG when the process asks for devices
   and when it forks, and as the driver does it keeps a device file open from the first question on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

static void record(const char *event) {
    FILE *log = fopen(getenv("SHIM_LOG"), "a");
    fprintf(log, "%s\n", event);
    fclose(log);
}

int cudaGetDeviceCount(int *count) {
    record("device");
    open("/dev/zero", O_RDWR | O_CLOEXEC);
    *count = 0;
    return 100; /* cudaErrorNoDevice */
}

pid_t fork(void) {
    record("fork");
    return ((pid_t (*)(void))dlsym(RTLD_NEXT, "fork"))();
}
