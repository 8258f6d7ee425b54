/* MB/s (10^6 bytes) of one memcpy of SIZE bytes between two shared mappings of memory files, both touched before: the median of
 * COUNT copies. usage: memcpy SIZE COUNT */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static char *mapping(size_t size, int fill) {
    int fd = memfd_create("memcpy", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return perror("memfd"), exit(1), NULL;
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return perror("mmap"), exit(1), NULL;
    return memset(at, fill, size);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int order(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

int main(int argc, char **argv) {
    size_t size = argc == 3 ? strtoul(argv[1], NULL, 10) : 0, count = argc == 3 ? strtoul(argv[2], NULL, 10) : 0;
    if (!size || !count) return fputs("usage: memcpy SIZE COUNT\n", stderr), 2;
    double *times = calloc(count, sizeof *times);
    char *from = mapping(size, 1), *to = mapping(size, 2);
    memcpy(to, from, size);
    for (size_t k = 0; k < count; k++) {
        double start = seconds();
        memcpy(to, from, size);
        __asm__ volatile("" ::"r"(to) : "memory"); /* so that no copy is left out */
        times[k] = seconds() - start;
    }
    qsort(times, count, sizeof *times, order);
    printf("%.1f\n", (double)size / times[count / 2] / 1e6);
}
