/*
 * A model of the CUDA driver library (libcuda.so.1), with which GPU code is tested on machines without a GPU.
 *
 * Build: gcc -std=gnu11 -O2 -Wall -Wextra -Werror -shared -fPIC -pthread -Wl,-soname,libcuda.so.1 \
 *            -o libcuda.so.1 cuda.c
 *   -DMODEL_OLD      leaves out the symbols that old drivers lack: VMM, writing values, flushing RDMA writes
 *   -DMODEL_ANCIENT  leaves out cuPointerGetAttribute
 *
 * Device addresses lie in a window in which the CPU may not read or write; the bytes are in memfds, mapped elsewhere.
 * Every stream has a thread, which takes its work in order. Where the real driver is lenient, the model is strict: what
 * frees memory does not wait for pending work, so work that comes too late faults; freed addresses do not come back.
 *
 * Environment, read by cuInit:
 *   MODEL_DEVICES=n          devices, 1 to 8 (default 1); 0: there is none
 *   MODEL_MEMORY_MB=n        memory of each (4096)
 *   MODEL_VERSION=n          the driver's version (13000)
 *   MODEL_NO_PEER=1          no device reaches another's memory
 *   MODEL_NO_VMM=1           no virtual memory management
 *   MODEL_NO_POOLS=1         no cuMemAllocAsync
 *   MODEL_NO_WRITE_VALUE=1   cuStreamWriteValue32 is not supported
 *   MODEL_FLUSH_OPTIONS=n    device attribute 117 (1)
 *   MODEL_WRITES_ORDERING=n  device attribute 118 (100)
 *   MODEL_REUSE=1            freed addresses are given to the next allocation of the same size
 *   MODEL_COPY_MBPS=n        copies take bytes / n microseconds longer (0: no limit)
 *   MODEL_SHUFFLE=1          random waits before each piece of work, up to 200 microseconds
 *
 * For tests: model_count(function's name), model_live() and model_pinned() in bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 8
#define MAX_PEERS 64
#define MAX_DEPTH 64
#define GRANULE ((size_t)2 << 20)
#define FRESH 0xA5

typedef int result;
typedef uint64_t address;
typedef void (*host_function)(void *);

/* ---- Results ---- */

#define RESULTS(X) \
    X(SUCCESS, 0, "no error") \
    X(INVALID_VALUE, 1, "invalid argument") \
    X(OUT_OF_MEMORY, 2, "out of memory") \
    X(NOT_INITIALIZED, 3, "initialization error") \
    X(DEINITIALIZED, 4, "driver shutting down") \
    X(NO_DEVICE, 100, "no CUDA-capable device is detected") \
    X(INVALID_DEVICE, 101, "invalid device ordinal") \
    X(INVALID_IMAGE, 200, "device kernel image is invalid") \
    X(INVALID_CONTEXT, 201, "invalid device context") \
    X(NO_BINARY_FOR_GPU, 209, "no kernel image is available for execution on the device") \
    X(ECC_UNCORRECTABLE, 214, "uncorrectable ECC error encountered") \
    X(UNSUPPORTED_LIMIT, 215, "limit is not supported on this architecture") \
    X(PEER_ACCESS_UNSUPPORTED, 217, "peer access is not supported between these two devices") \
    X(INVALID_PTX, 218, "a PTX JIT compilation failed") \
    X(NVLINK_UNCORRECTABLE, 220, "uncorrectable NVLink error detected during the execution") \
    X(FILE_NOT_FOUND, 301, "file not found") \
    X(OPERATING_SYSTEM, 304, "OS call failed or operation not supported on this OS") \
    X(INVALID_HANDLE, 400, "invalid resource handle") \
    X(ILLEGAL_STATE, 401, "the operation cannot be performed in the present state") \
    X(NOT_FOUND, 500, "named symbol not found") \
    X(NOT_READY, 600, "device not ready") \
    X(ILLEGAL_ADDRESS, 700, "an illegal memory access was encountered") \
    X(LAUNCH_OUT_OF_RESOURCES, 701, "too many resources requested for launch") \
    X(LAUNCH_TIMEOUT, 702, "the launch timed out and was terminated") \
    X(PEER_ACCESS_ALREADY_ENABLED, 704, "peer access is already enabled") \
    X(PEER_ACCESS_NOT_ENABLED, 705, "peer access has not been enabled") \
    X(PRIMARY_CONTEXT_ACTIVE, 708, "cannot set while device is active in this process") \
    X(CONTEXT_IS_DESTROYED, 709, "context is destroyed") \
    X(ASSERT, 710, "device-side assert triggered") \
    X(TOO_MANY_PEERS, 711, "peer mapping resources exhausted") \
    X(HOST_MEMORY_ALREADY_REGISTERED, 712, "part or all of the requested memory range is already mapped") \
    X(HOST_MEMORY_NOT_REGISTERED, 713, "pointer does not correspond to a registered memory region") \
    X(ILLEGAL_INSTRUCTION, 715, "an illegal instruction was encountered") \
    X(MISALIGNED_ADDRESS, 716, "misaligned address") \
    X(INVALID_ADDRESS_SPACE, 717, "operation not supported on global/shared address space") \
    X(LAUNCH_FAILED, 719, "unspecified launch failure") \
    X(NOT_PERMITTED, 800, "operation not permitted") \
    X(NOT_SUPPORTED, 801, "operation not supported") \
    X(STREAM_CAPTURE_UNSUPPORTED, 900, "operation not permitted when stream is capturing") \
    X(UNKNOWN, 999, "unknown error")

#define AS_ENUM(name, number, text) name = number,
enum { RESULTS(AS_ENUM) };

struct result_text {
    result code;
    const char *name, *text;
};

#define AS_TEXT(name, number, text) {number, number ? "CUDA_ERROR_" #name : "CUDA_SUCCESS", text},
static const struct result_text result_texts[] = {RESULTS(AS_TEXT)};

static const struct result_text *text_of(result code) {
    for (size_t i = 0; i < sizeof result_texts / sizeof *result_texts; i++)
        if (result_texts[i].code == code) return &result_texts[i];
    return NULL;
}

/* ---- State ---- */

enum magic { CONTEXT = 0x43545831, STREAM = 0x53545231, EVENT = 0x45564e31, MODULE = 0x4d4f4431, FUNCTION = 0x46554e31,
             HANDLE = 0x48444c31, POOL_OF = 0x504f4f31, DEAD = 0x44454144 };

/* Objects begin with this. They are never given back to malloc, so that the handle of a dead one is recognized. */
struct object {
    enum magic magic;
};

/* Bytes: of a device, with a descriptor, or of the host. */
struct backing {
    long refs;
    int fd, device;
    size_t size;
    char *bytes;
    uint64_t id;
    bool counted, unmap;
};

enum kind { ALLOC, POOL, VMM, IPC, HOST, REGISTERED };

/* Addresses that the driver knows. */
struct range {
    address start;
    size_t size;
    enum kind kind;
    struct backing *backing;
    struct context *ctx;
    struct handle *handle;
    int device;
    uint64_t id;
    /* Bits of devices, for VMM. */
    unsigned readers, writers;
    unsigned flags;
    bool freeing;
    /* For memory of another process. */
    int owner_pid, opened;
    uint64_t owner_id;
};

/* Mappings keep it as well; `users` is how often it may be released. */
struct handle {
    struct object object;
    long refs, users;
    struct backing *backing;
    int handle_types;
};

struct reservation {
    address start;
    size_t size;
};

struct pool {
    struct object object;
    int device;
    unsigned access;
    uint64_t threshold;
};

struct device {
    int ordinal, retained;
    struct context *primary;
    size_t used, pooled;
    struct pool pool;
};

struct context {
    struct object object;
    struct device *device;
    /* `failing` from the fault on; `error` once nothing touches memory any more, which is when callers are told. */
    result failing, error;
    bool destroyed;
    int active;
    unsigned flags;
    struct stream *null, *streams;
    struct context *peers[MAX_PEERS];
    int peer_count;
};

/* A piece of work's place in a stream. */
struct point {
    struct stream *stream;
    uint64_t number;
};

struct stream {
    struct object object;
    struct context *ctx;
    struct stream *next;
    unsigned flags;
    int priority;
    bool started, closing;
    pthread_cond_t wake;
    struct work *head, *tail;
    uint64_t submitted, completed;
    uint64_t random;
};

struct event {
    struct object object;
    struct context *ctx;
    unsigned flags;
    struct point point;
    /* When it was reached, for the record with this number. */
    uint64_t timed;
    double seconds;
};

struct module {
    struct object object;
    struct context *ctx;
    char *text;
};

struct function {
    struct object object;
    struct module *module;
    int kernel;
};

enum what { COPY, FILL, KERNEL, RECORD, WAIT, CALL, WRITE, FREE };

/* Where a copy reads or writes: a plain pointer, or an address that is looked up when it is run. */
struct operand {
    address at;
    char *raw;
};

struct work {
    struct work *next;
    enum what what;
    uint64_t number;
    struct point *before;
    int before_count;
    struct operand to, from;
    size_t bytes;
    uint32_t pattern;
    char *staging;
    int kernel;
    uint64_t args[8];
    struct event *event;
    host_function call;
    void *data;
    uint64_t range_id;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Told whenever work is done. */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static bool initialized;
static __thread bool in_host_function;
static __thread struct context *stack[MAX_DEPTH];
static __thread int depth;

static struct {
    int devices, version, flush_options, writes_ordering;
    size_t memory;
    long copy_mbps;
    bool peer, vmm, pools, write_value, reuse, shuffle;
} config;
static struct device devices[MAX_DEVICES];

/* Sorted by address. */
static struct range **ranges;
static size_t range_count, range_room;
static struct reservation *spare;
static size_t spare_count, spare_room;
static address window, window_end, window_next;
static uint64_t last_id;
static size_t live, pinned;

static bool is(const void *handle, enum magic magic) {
    return (uintptr_t)handle > 4096 && (uintptr_t)handle % 8 == 0 && ((const struct object *)handle)->magic == magic;
}

static void *make(size_t size, enum magic magic) {
    struct object *object = calloc(1, size);
    if (!object) abort();
    object->magic = magic;
    return object;
}

static void *grow(void *array, size_t *room, size_t count, size_t size) {
    if (count < *room) return array;
    *room = *room ? *room * 2 : 64;
    array = realloc(array, *room * size);
    if (!array) abort();
    return array;
}

static size_t round_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

/* ---- Counting of calls ---- */

struct counter {
    const char *name;
    unsigned long long count;
    struct counter *next;
};

static struct counter *counters;

static void count_call(struct counter *counter) {
    if (__atomic_fetch_add(&counter->count, 1, __ATOMIC_RELAXED) > 0) return;
    struct counter *first = __atomic_load_n(&counters, __ATOMIC_ACQUIRE);
    do counter->next = first;
    while (!__atomic_compare_exchange_n(&counters, &first, counter, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
}

API unsigned long long model_count(const char *name) {
    for (struct counter *at = __atomic_load_n(&counters, __ATOMIC_ACQUIRE); at; at = at->next)
        if (!strcmp(at->name, name)) return __atomic_load_n(&at->count, __ATOMIC_RELAXED);
    return 0;
}

API unsigned long long model_live(void) {
    pthread_mutex_lock(&lock);
    size_t bytes = live;
    pthread_mutex_unlock(&lock);
    return bytes;
}

API unsigned long long model_pinned(void) {
    pthread_mutex_lock(&lock);
    size_t bytes = pinned;
    pthread_mutex_unlock(&lock);
    return bytes;
}

#define COUNT() \
    do { \
        static struct counter counter_ = {.name = __func__}; \
        count_call(&counter_); \
    } while (0)

/* What every function begins with: host functions may not call the driver. */
#define ENTER() \
    do { \
        COUNT(); \
        if (in_host_function) return NOT_PERMITTED; \
        if (!__atomic_load_n(&initialized, __ATOMIC_ACQUIRE)) return NOT_INITIALIZED; \
    } while (0)

#define NEED(condition, code) \
    do { \
        if (!(condition)) return code; \
    } while (0)

static result unlock(result code) {
    pthread_mutex_unlock(&lock);
    return code;
}

/* ---- Contexts of threads ---- */

static struct context *current(void) {
    return depth ? stack[depth - 1] : NULL;
}

static result state_of(const struct context *ctx) {
    if (!ctx) return INVALID_CONTEXT;
    return ctx->destroyed ? CONTEXT_IS_DESTROYED : ctx->error;
}

/* Takes the lock; keeps it only on success. */
static result lock_current(struct context **ctx) {
    pthread_mutex_lock(&lock);
    *ctx = current();
    result state = state_of(*ctx);
    if (state) pthread_mutex_unlock(&lock);
    return state;
}

static struct device *device_of(int ordinal) {
    return ordinal >= 0 && ordinal < config.devices ? &devices[ordinal] : NULL;
}

/* ---- Memory ---- */

/* The index of the first range that begins behind the address. */
static size_t range_behind(address at) {
    size_t low = 0, high = range_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->start <= at) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct range *range_at(address at) {
    size_t behind = range_behind(at);
    if (!behind) return NULL;
    struct range *range = ranges[behind - 1];
    return at - range->start < range->size ? range : NULL;
}

static bool overlaps(address start, size_t size) {
    size_t behind = range_behind(start);
    return range_at(start) || (behind < range_count && ranges[behind]->start - start < size);
}

static bool on_host(const struct range *range) {
    return range->kind == HOST || range->kind == REGISTERED;
}

static bool in_window(address at) {
    return at >= window && at < window_end;
}

static void add_range(struct range *range) {
    ranges = grow(ranges, &range_room, range_count, sizeof *ranges);
    size_t at = range_behind(range->start);
    memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
    ranges[at] = range;
    range_count++;
    if (on_host(range)) pinned += range->size;
    if (range->kind == POOL) devices[range->device].pooled += range->size;
}

static struct range *new_range(address start, size_t size, enum kind kind, struct backing *backing,
                               struct context *ctx) {
    struct range *range = calloc(1, sizeof *range);
    if (!range) abort();
    *range = (struct range){.start = start, .size = size, .kind = kind, .backing = backing, .ctx = ctx};
    range->id = ++last_id;
    range->device = backing->device;
    add_range(range);
    return range;
}

static void free_backing(struct backing *backing) {
    if (backing->unmap) munmap(backing->bytes, backing->size);
    if (backing->fd >= 0) close(backing->fd);
    if (backing->counted) {
        live -= backing->size;
        devices[backing->device].used -= backing->size;
    }
    free(backing);
}

static void put(struct backing *backing) {
    if (backing && --backing->refs == 0) free_backing(backing);
}

/* Addresses that were given back, for MODEL_REUSE. */
static void give_address(address start, size_t size) {
    if (!config.reuse) return;
    spare = grow(spare, &spare_room, spare_count, sizeof *spare);
    spare[spare_count++] = (struct reservation){start, size};
}

/* Small allocations of the real driver are aligned to 512 bytes only. */
static address take_address(size_t size, size_t align) {
    for (size_t i = spare_count; i-- > 0;) {
        if (spare[i].size != size) continue;
        address start = spare[i].start;
        memmove(spare + i, spare + i + 1, (--spare_count - i) * sizeof *spare);
        return start;
    }
    address start = round_up(window_next, align > GRANULE ? align : GRANULE);
    if (align < GRANULE && size < GRANULE / 2) start += 512 * (1 + last_id % 7);
    if (start >= window_end || window_end - start < size) return 0;
    /* A granule stays free behind it, so that a run over the end is seen. */
    window_next = start + size + GRANULE;
    return start;
}

static void remove_range(struct range *range) {
    size_t at = range_behind(range->start) - 1;
    memmove(ranges + at, ranges + at + 1, (--range_count - at) * sizeof *ranges);
    if (on_host(range)) pinned -= range->size;
    else if (range->kind != VMM) give_address(range->start, range->size);
    if (range->kind == POOL) devices[range->device].pooled -= range->size;
    put(range->backing);
    free(range);
}

static char *map_fd(int fd, size_t size) {
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return bytes == MAP_FAILED ? NULL : bytes;
}

static struct backing *hold(char *bytes, size_t size, int device, int fd, uint64_t id, bool unmap) {
    struct backing *backing = calloc(1, sizeof *backing);
    if (!backing) abort();
    *backing = (struct backing){1, fd, device, size, bytes, id, .unmap = unmap};
    return backing;
}

static struct backing *fresh_bytes(int device, size_t size, uint64_t id) {
    /* By the name, another process sees what it has got. */
    char name[64];
    snprintf(name, sizeof name, "cuda-model-%d-%llu", device, (unsigned long long)id);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0) return NULL;
    char *bytes = ftruncate(fd, (off_t)size) ? NULL : map_fd(fd, size);
    if (!bytes) {
        close(fd);
        return NULL;
    }
    memset(bytes, FRESH, size);
    return hold(bytes, size, device, fd, id, true);
}

/* Memory of a device. Called with the lock, which is let go while the bytes are made. */
static result new_backing(struct device *device, size_t size, struct backing **out) {
    if (size > config.memory || device->used > config.memory - size) return OUT_OF_MEMORY;
    device->used += size;
    live += size;
    uint64_t id = ++last_id;
    pthread_mutex_unlock(&lock);
    struct backing *backing = fresh_bytes(device->ordinal, size, id);
    pthread_mutex_lock(&lock);
    if (!backing) {
        device->used -= size;
        live -= size;
        return OUT_OF_MEMORY;
    }
    backing->counted = true;
    *out = backing;
    return SUCCESS;
}

static bool has_peer(const struct context *ctx, const struct context *peer) {
    for (int i = 0; i < ctx->peer_count; i++)
        if (ctx->peers[i] == peer) return true;
    return false;
}

/* Whether work of a context may touch a range. Copies reach other devices' memory without peer access, by a detour. */
static bool may_touch(const struct context *ctx, const struct range *range, bool write, bool copy) {
    int here = ctx->device->ordinal;
    if (on_host(range)) return true;
    if (range->kind == VMM) {
        unsigned bits = 1u << here | (copy ? 1u << range->device : 0);
        return (write ? range->writers : range->readers) & bits;
    }
    if (range->device == here || copy) return true;
    if (range->kind == POOL) return devices[range->device].pool.access >> here & 1;
    return has_peer(ctx, range->ctx);
}

static bool all_touchable(const struct context *ctx, address at, size_t bytes, bool write, bool copy) {
    while (bytes) {
        struct range *range = range_at(at);
        if (!range || !may_touch(ctx, range, write, copy)) return false;
        size_t here = range->size - (at - range->start);
        if (here >= bytes) return true;
        at += here;
        bytes -= here;
    }
    return true;
}

/* A pointer to the bytes at an address, how many there are in one piece, and a reference that keeps them. */
static char *piece(struct context *ctx, struct operand place, size_t done, bool write, bool copy, size_t *n,
                   struct backing **kept) {
    *kept = NULL;
    if (place.raw) return place.raw + done;
    address at = place.at + done;
    struct range *range = range_at(at);
    if (!range || !may_touch(ctx, range, write, copy)) return NULL;
    size_t offset = at - range->start;
    if (*n > range->size - offset) *n = range->size - offset;
    *kept = range->backing;
    range->backing->refs++;
    return range->backing->bytes + offset;
}

/* ---- Work ---- */

static void nap(double seconds) {
    if (seconds <= 0) return;
    struct timespec left = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static void nap_unlocked(double seconds) {
    pthread_mutex_unlock(&lock);
    nap(seconds);
    pthread_mutex_lock(&lock);
}

static void free_work(struct work *work) {
    free(work->before);
    free(work->staging);
    free(work);
}

static void drop_queue(struct stream *stream) {
    while (stream->head) {
        struct work *work = stream->head;
        stream->head = work->next;
        free_work(work);
    }
    stream->tail = NULL;
    stream->completed = stream->submitted;
}

/* The context is lost. Callers are told only once nothing touches memory any more: they may free it then. */
static void poison(struct context *ctx, result code) {
    if (ctx->failing) return;
    ctx->failing = code;
    pthread_cond_broadcast(&progress);
    while (ctx->active) pthread_cond_wait(&progress, &lock);
    ctx->error = code;
    for (struct stream *stream = ctx->streams; stream; stream = stream->next) drop_queue(stream);
    pthread_cond_broadcast(&progress);
}

typedef void (*body)(char *to, const char *from, size_t n, const void *arg);

/* Does something with all bytes of one or two places, piece by piece, without the lock. */
static void over(struct context *ctx, struct operand to, const struct operand *from, size_t bytes, bool copy, body body,
                 const void *arg) {
    if ((!to.raw && !all_touchable(ctx, to.at, bytes, true, copy)) ||
        (from && !from->raw && !all_touchable(ctx, from->at, bytes, false, copy))) {
        poison(ctx, ILLEGAL_ADDRESS);
        return;
    }
    for (size_t done = 0; done < bytes && !ctx->failing;) {
        size_t n = bytes - done;
        struct backing *to_kept, *from_kept = NULL;
        char *target = piece(ctx, to, done, true, copy, &n, &to_kept);
        const char *source = from ? piece(ctx, *from, done, false, copy, &n, &from_kept) : NULL;
        bool whole = target && (!from || source);
        if (whole) {
            ctx->active++;
            pthread_mutex_unlock(&lock);
            body(target, source, n, arg);
            pthread_mutex_lock(&lock);
            ctx->active--;
            if (ctx->failing) pthread_cond_broadcast(&progress);
        }
        put(to_kept);
        put(from_kept);
        if (!whole) {
            poison(ctx, ILLEGAL_ADDRESS);
            return;
        }
        done += n;
    }
}

static void copy_body(char *to, const char *from, size_t n, const void *arg) {
    (void)arg;
    memmove(to, from, n);
}

static void fill_body(char *to, const char *from, size_t n, const void *arg) {
    (void)from;
    const char *pattern = arg;
    if (pattern[0] == pattern[1] && pattern[0] == pattern[2] && pattern[0] == pattern[3]) {
        memset(to, pattern[0], n);
        return;
    }
    for (size_t i = 0; i < n; i += 4) memcpy(to + i, pattern, n - i < 4 ? n - i : 4);
}

static void xor_body(char *to, const char *from, size_t n, const void *arg) {
    (void)from;
    uint32_t value = *(const uint32_t *)arg;
    for (size_t i = 0; i + 4 <= n; i += 4) *(uint32_t *)(to + i) ^= value;
}

static void axpy_body(char *to, const char *from, size_t n, const void *arg) {
    float a = *(const float *)arg;
    for (size_t i = 0; i + 4 <= n; i += 4) *(float *)(to + i) += a * *(const float *)(from + i);
}

/* A few bytes that are touched at once, with the lock held. NULL if that is a fault, which is then dealt with. */
static char *word_at(struct context *ctx, address at, size_t size, bool copy) {
    if (at % size) {
        poison(ctx, MISALIGNED_ADDRESS);
        return NULL;
    }
    struct range *range = range_at(at);
    if (!range || range->size - (at - range->start) < size || !may_touch(ctx, range, true, copy)) {
        poison(ctx, ILLEGAL_ADDRESS);
        return NULL;
    }
    return range->backing->bytes + (at - range->start);
}

static void run_copy(struct context *ctx, struct work *work) {
    if (config.copy_mbps > 0) nap_unlocked((double)work->bytes / ((double)config.copy_mbps * 1e6));
    if (!ctx->failing) over(ctx, work->to, &work->from, work->bytes, true, copy_body, NULL);
}

/* ---- Kernels ---- */

static void fetch_add(struct context *ctx, const uint64_t *args) {
    uint64_t *word = (uint64_t *)word_at(ctx, args[0], 8, false);
    uint64_t *former = word ? (uint64_t *)word_at(ctx, args[2], 8, false) : NULL;
    if (former) __atomic_store_n(former, __atomic_fetch_add(word, args[1], __ATOMIC_SEQ_CST), __ATOMIC_RELEASE);
}

static void compare_swap(struct context *ctx, const uint64_t *args) {
    uint64_t *word = (uint64_t *)word_at(ctx, args[0], 8, false), was = args[1];
    uint64_t *former = word ? (uint64_t *)word_at(ctx, args[3], 8, false) : NULL;
    if (!former) return;
    __atomic_compare_exchange_n(word, &was, args[2], false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    __atomic_store_n(former, was, __ATOMIC_RELEASE);
}

static bool delayed(struct context *ctx, uint64_t milliseconds) {
    nap_unlocked((double)milliseconds * 1e-3);
    return !ctx->failing;
}

/* Words of 32 bits, as the kernels load and store them. */
static bool words(struct context *ctx, address a, address b) {
    if (a % 4 == 0 && b % 4 == 0) return true;
    poison(ctx, MISALIGNED_ADDRESS);
    return false;
}

static void test_fill(struct context *ctx, const uint64_t *args) {
    uint32_t value = (uint32_t)args[2];
    if (delayed(ctx, args[3]) && words(ctx, args[0], 0))
        over(ctx, (struct operand){.at = args[0]}, NULL, args[1] / 4 * 4, false, fill_body, &value);
}

static void test_copy(struct context *ctx, const uint64_t *args) {
    struct operand from = {.at = args[1]};
    if (delayed(ctx, args[3])) over(ctx, (struct operand){.at = args[0]}, &from, args[2], false, copy_body, NULL);
}

static void test_xor(struct context *ctx, const uint64_t *args) {
    uint32_t value = (uint32_t)args[2];
    if (delayed(ctx, args[3]) && words(ctx, args[0], 0))
        over(ctx, (struct operand){.at = args[0]}, NULL, args[1] / 4 * 4, false, xor_body, &value);
}

static void test_fault(struct context *ctx, const uint64_t *args) {
    (void)args;
    word_at(ctx, 0x10, 4, false);
}

static void axpy(struct context *ctx, const uint64_t *args) {
    struct operand from = {.at = args[1]};
    float a;
    memcpy(&a, &args[2], sizeof a);
    if (words(ctx, args[0], args[1]))
        over(ctx, (struct operand){.at = args[0]}, &from, (size_t)(uint32_t)args[3] * 4, false, axpy_body, &a);
}

/* ---- Kernels of the examples ---- */

/* So many words of 32 bits, with the lock held. NULL if they are not all there, which is then dealt with. */
static void *words_at(struct context *ctx, address at, size_t n) {
    if (!words(ctx, at, 0)) return NULL;
    struct range *range = range_at(at);
    if (!range || (range->size - (at - range->start)) / 4 < n || !may_touch(ctx, range, true, false)) {
        poison(ctx, ILLEGAL_ADDRESS);
        return NULL;
    }
    return range->backing->bytes + (at - range->start);
}

static void adam(struct context *ctx, const uint64_t *args) {
    size_t n = (uint32_t)args[5];
    float *weights = words_at(ctx, args[0], n), *moments = words_at(ctx, args[2], 2 * n), c1, c2;
    const float *gradient = words_at(ctx, args[1], n);
    if (!weights || !gradient || !moments) return;
    memcpy(&c1, &args[3], sizeof c1);
    memcpy(&c2, &args[4], sizeof c2);
    for (size_t i = 0; i < n; i++) {
        float g = gradient[i], *m = &moments[i], *s = &moments[n + i];
        if (!isfinite(g)) continue;
        *m = 0.9f * *m + 0.1f * g;
        *s = 0.999f * *s + 0.001f * g * g;
        weights[i] -= 0.002f * (*m / c1) / (sqrtf(*s / c2) + 1e-8f);
    }
}

static void ramp(struct context *ctx, const uint64_t *args) {
    uint32_t n = (uint32_t)args[1], first = (uint32_t)args[2], *out = words_at(ctx, args[0], n);
    for (uint32_t i = 0; out && i < n; i++) out[i] = first + i;
}

static void count_wrong(struct context *ctx, const uint64_t *args) {
    uint32_t n = (uint32_t)args[1], first = (uint32_t)args[2], *in = words_at(ctx, args[0], n);
    uint32_t *wrong = words_at(ctx, args[3], 1);
    for (uint32_t i = 0; in && wrong && i < n; i++) *wrong += in[i] != first + i;
}

/* The sizes of the arguments, in order, end with a zero. */
static const struct {
    const char *name;
    unsigned char sizes[9];
    void (*run)(struct context *, const uint64_t *);
} kernels[] = {
    {"gpusock_fetch_add", {8, 8, 8}, fetch_add},
    {"gpusock_compare_swap", {8, 8, 8, 8}, compare_swap},
    {"test_fill", {8, 8, 4, 4}, test_fill},
    {"test_copy", {8, 8, 8, 4}, test_copy},
    {"test_xor", {8, 8, 4, 4}, test_xor},
    {"test_fault", {0}, test_fault},
    {"axpy", {8, 8, 4, 4}, axpy},
    {"adam", {8, 8, 8, 4, 4, 4}, adam},
    {"ramp", {8, 4, 4}, ramp},
    {"count_wrong", {8, 4, 4, 8}, count_wrong},
};

/* ---- Threads of streams ---- */

static void run_free(uint64_t id) {
    for (size_t i = 0; i < range_count; i++) {
        if (ranges[i]->id != id) continue;
        remove_range(ranges[i]);
        return;
    }
}

static void run_call(const struct work *work) {
    pthread_mutex_unlock(&lock);
    in_host_function = true;
    work->call(work->data);
    in_host_function = false;
    pthread_mutex_lock(&lock);
}

static void run_record(struct event *event, uint64_t number) {
    event->timed = number;
    event->seconds = now();
}

static void run(struct context *ctx, struct work *work) {
    switch (work->what) {
    case COPY: run_copy(ctx, work); break;
    case FILL: over(ctx, work->to, NULL, work->bytes, false, fill_body, &work->pattern); break;
    case KERNEL: kernels[work->kernel].run(ctx, work->args); break;
    case RECORD: run_record(work->event, work->number); break;
    case WAIT: break;
    case CALL: run_call(work); break;
    case WRITE: {
        uint32_t *word = (uint32_t *)word_at(ctx, work->to.at, 4, true);
        if (word) __atomic_store_n(word, work->pattern, __ATOMIC_RELEASE);
        break;
    }
    case FREE: run_free(work->range_id); break;
    }
}

static bool reached(struct point point) {
    return !point.stream || point.stream->completed >= point.number;
}

static void shuffle(struct stream *stream) {
    stream->random ^= stream->random << 13;
    stream->random ^= stream->random >> 7;
    stream->random ^= stream->random << 17;
    nap_unlocked((double)(stream->random % 200) * 1e-6);
}

static void unlink_stream(struct stream *stream) {
    struct stream **at = &stream->ctx->streams;
    while (*at && *at != stream) at = &(*at)->next;
    if (*at) *at = stream->next;
}

static void do_next(struct stream *stream) {
    struct context *ctx = stream->ctx;
    struct work *work = stream->head;
    stream->head = work->next;
    if (!stream->head) stream->tail = NULL;
    if (config.shuffle) shuffle(stream);
    for (int i = 0; i < work->before_count; i++)
        while (!reached(work->before[i]) && !ctx->failing) pthread_cond_wait(&progress, &lock);
    if (!ctx->failing) run(ctx, work);
    /* Work that was not done must not look as if it were, so the failure is told first. */
    while (ctx->failing && !ctx->error) pthread_cond_wait(&progress, &lock);
    if (stream->completed < work->number) stream->completed = work->number;
    free_work(work);
    pthread_cond_broadcast(&progress);
}

static void *stream_thread(void *arg) {
    struct stream *stream = arg;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->head && !stream->closing) pthread_cond_wait(&stream->wake, &lock);
        if (!stream->head) break;
        do_next(stream);
    }
    unlink_stream(stream);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void start_thread(struct stream *stream) {
    if (stream->started) return;
    stream->started = true;
    /* Signals are the program's own threads' business. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (pthread_create(&thread, NULL, stream_thread, stream)) abort();
    pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static struct stream *new_stream(struct context *ctx, unsigned flags) {
    struct stream *stream = make(sizeof *stream, STREAM);
    stream->ctx = ctx;
    stream->flags = flags;
    stream->random = 0x9e3779b97f4a7c15u * ++last_id;
    pthread_cond_init(&stream->wake, NULL);
    stream->next = ctx->streams;
    ctx->streams = stream;
    return stream;
}

static struct work *new_work(enum what what) {
    struct work *work = calloc(1, sizeof *work);
    if (!work) abort();
    work->what = what;
    return work;
}

static void wait_before(struct work *work, struct point point) {
    if (reached(point)) return;
    work->before = realloc(work->before, (size_t)(work->before_count + 1) * sizeof *work->before);
    if (!work->before) abort();
    work->before[work->before_count++] = point;
}

static bool blocking(const struct stream *stream) {
    return !(stream->flags & 1);
}

/* The null stream and the blocking streams wait for each other. */
static void wait_for_legacy(struct stream *stream, struct work *work) {
    struct context *ctx = stream->ctx;
    if (stream != ctx->null) {
        if (blocking(stream)) wait_before(work, (struct point){ctx->null, ctx->null->submitted});
        return;
    }
    for (struct stream *other = ctx->streams; other; other = other->next)
        if (other != stream && blocking(other)) wait_before(work, (struct point){other, other->submitted});
}

/* With the lock. */
static struct point submit(struct stream *stream, struct work *work) {
    wait_for_legacy(stream, work);
    work->number = ++stream->submitted;
    if (stream->tail) stream->tail->next = work;
    else stream->head = work;
    stream->tail = work;
    start_thread(stream);
    pthread_cond_signal(&stream->wake);
    return (struct point){stream, work->number};
}

/* With the lock. Ends early if the context fails: nothing touches memory any more then. */
static result wait_for(struct point point) {
    while (!reached(point)) pthread_cond_wait(&progress, &lock);
    return point.stream->ctx->error;
}

/* The stream of the calling thread, for the handle 2. */
static struct stream *thread_stream(struct context *ctx) {
    static __thread struct stream *mine[MAX_DEVICES];
    struct stream **slot = &mine[ctx->device->ordinal];
    if (!*slot || (*slot)->ctx != ctx) *slot = new_stream(ctx, 0);
    return *slot;
}

static struct stream *stream_of(void *handle, struct context *ctx) {
    if ((uintptr_t)handle <= 1) return ctx->null;
    if ((uintptr_t)handle == 2) return thread_stream(ctx);
    if (!is(handle, STREAM)) return NULL;
    struct stream *stream = handle;
    return stream->closing ? NULL : stream;
}

/* Takes the lock, for work on a stream; keeps it only on success. */
static result lock_stream(void *handle, struct stream **stream) {
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    *stream = stream_of(handle, ctx);
    if (!*stream) return unlock(INVALID_HANDLE);
    state = state_of((*stream)->ctx);
    return state ? unlock(state) : SUCCESS;
}

/* ---- Library, errors, devices ---- */

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

static void read_config(void) {
    long count = number("MODEL_DEVICES", 1);
    config.devices = count < 0 ? 0 : count > MAX_DEVICES ? MAX_DEVICES : (int)count;
    config.flush_options = (int)number("MODEL_FLUSH_OPTIONS", 1);
    config.writes_ordering = (int)number("MODEL_WRITES_ORDERING", 100);
    config.memory = (size_t)number("MODEL_MEMORY_MB", 4096) << 20;
    config.copy_mbps = number("MODEL_COPY_MBPS", 0);
    config.peer = !number("MODEL_NO_PEER", 0);
    config.vmm = !number("MODEL_NO_VMM", 0);
    config.pools = !number("MODEL_NO_POOLS", 0);
    config.write_value = !number("MODEL_NO_WRITE_VALUE", 0);
    config.reuse = number("MODEL_REUSE", 0);
    config.shuffle = number("MODEL_SHUFFLE", 0);
}

/* Addresses are never used twice, so the window is as large as the system lets it be. */
static bool open_window(void) {
    for (size_t size = (size_t)32 << 40; size >= (size_t)1 << 34; size /= 2) {
        void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) continue;
        window = (address)at;
        window_end = window + size;
        window_next = window + GRANULE;
        return true;
    }
    return false;
}

static result start(void) {
    read_config();
    if (!config.devices) return NO_DEVICE;
    if (!open_window()) return OUT_OF_MEMORY;
    for (int i = 0; i < MAX_DEVICES; i++) {
        devices[i].ordinal = i;
        devices[i].pool = (struct pool){.object = {POOL_OF}, .device = i, .access = 1u << i};
    }
    /* Threads run in this library from now on, so it must not be unloaded. */
    Dl_info info;
    if (dladdr((void *)open_window, &info)) dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    __atomic_store_n(&initialized, true, __ATOMIC_RELEASE);
    return SUCCESS;
}

API result cuInit(unsigned flags) {
    COUNT();
    NEED(!in_host_function, NOT_PERMITTED);
    NEED(!flags, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    return unlock(initialized ? SUCCESS : start());
}

API result cuDriverGetVersion(int *version) {
    COUNT();
    NEED(version, INVALID_VALUE);
    *version = (int)number("MODEL_VERSION", 13000);
    return SUCCESS;
}

API result cuGetErrorName(result code, const char **name) {
    COUNT();
    const struct result_text *text = text_of(code);
    *name = text ? text->name : NULL;
    return text ? SUCCESS : INVALID_VALUE;
}

API result cuGetErrorString(result code, const char **string) {
    COUNT();
    const struct result_text *text = text_of(code);
    *string = text ? text->text : NULL;
    return text ? SUCCESS : INVALID_VALUE;
}

API result cuDeviceGetCount(int *count) {
    ENTER();
    *count = config.devices;
    return SUCCESS;
}

API result cuDeviceGet(int *device, int ordinal) {
    ENTER();
    NEED(device_of(ordinal), INVALID_DEVICE);
    *device = ordinal;
    return SUCCESS;
}

API result cuDeviceGetName(char *name, int len, int device) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    NEED(name && len > 0, INVALID_VALUE);
    snprintf(name, (size_t)len, "Model GPU");
    return SUCCESS;
}

API result cuDeviceGetPCIBusId(char *id, int len, int device) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    NEED(id && len > 0, INVALID_VALUE);
    snprintf(id, (size_t)len, "0000:%02x:00.0", device);
    return SUCCESS;
}

static result uuid_of(char *uuid, int device) {
    NEED(device_of(device), INVALID_DEVICE);
    memcpy(uuid, "CUDA model GPU ", 15);
    uuid[15] = (char)device;
    return SUCCESS;
}

API result cuDeviceGetUuid(char *uuid, int device) {
    ENTER();
    return uuid_of(uuid, device);
}

API result cuDeviceGetUuid_v2(char *uuid, int device) {
    ENTER();
    return uuid_of(uuid, device);
}

API result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    *bytes = config.memory;
    return SUCCESS;
}

API result cuDeviceComputeCapability(int *major, int *minor, int device) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

static int attribute(int which, int device) {
    switch (which) {
    case 1: case 2: case 3: return 1024; /* threads of a block */
    case 4: return 64;
    case 5: return 0x7fffffff; /* blocks of a grid */
    case 6: case 7: return 65535;
    case 8: return 48 << 10; /* shared memory */
    case 9: return 64 << 10;
    case 10: return 32; /* threads of a warp */
    case 11: return 0x7fffffff;
    case 12: case 82: return 65536; /* registers */
    case 13: return 1980000; /* kHz */
    case 14: return 512;
    case 15: case 31: case 41: case 95: case 99: return 1; /* overlap, concurrency, cooperation, ... */
    case 16: return 132; /* multiprocessors */
    case 19: return 1; /* the host's memory can be mapped */
    case 33: return device; /* PCI bus */
    case 36: return 3201000;
    case 37: return 6144;
    case 38: return 60 << 20;
    case 39: return 2048;
    case 40: return 3; /* copy engines */
    case 75: return 9;
    case 76: return 0;
    case 78: return 1; /* priorities */
    case 81: return 228 << 10;
    case 91: return 1; /* registered memory has one address */
    case 92: case 93: return config.write_value;
    case 97: return 227 << 10;
    case 102: return config.vmm;
    case 103: return 1;
    case 106: return 32;
    case 110: case 116: return 1;
    case 115: return config.pools;
    case 117: return config.flush_options;
    case 118: return config.writes_ordering;
    case 124: return 1;
    default: return 0;
    }
}

API result cuDeviceGetAttribute(int *value, int which, int device) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    NEED(value && which > 0 && which < 200, INVALID_VALUE);
    *value = attribute(which, device);
    return SUCCESS;
}

API result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER();
    NEED(device_of(device) && device_of(peer), INVALID_DEVICE);
    *can = device != peer && config.peer;
    return SUCCESS;
}

/* ---- Contexts ---- */

static struct context *new_context(struct device *device, unsigned flags) {
    struct context *ctx = make(sizeof *ctx, CONTEXT);
    ctx->device = device;
    ctx->flags = flags;
    ctx->null = new_stream(ctx, 0);
    return ctx;
}

/* With the lock. */
static result synchronize(struct context *ctx) {
    for (;;) {
        struct stream *busy = ctx->streams;
        while (busy && busy->completed >= busy->submitted) busy = busy->next;
        if (!busy || ctx->error) return ctx->error;
        pthread_cond_wait(&progress, &lock);
    }
}

/* Ends its streams and frees its memory. */
static void destroy(struct context *ctx) {
    synchronize(ctx);
    ctx->destroyed = true;
    for (struct stream *stream = ctx->streams; stream; stream = stream->next) {
        stream->closing = true;
        pthread_cond_signal(&stream->wake);
    }
    for (size_t i = range_count; i-- > 0;)
        if (ranges[i]->ctx == ctx) remove_range(ranges[i]);
}

API result cuDevicePrimaryCtxRetain(struct context **out, int device) {
    ENTER();
    struct device *of = device_of(device);
    NEED(of, INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    if (!of->primary) of->primary = new_context(of, 0);
    of->retained++;
    *out = of->primary;
    return unlock(SUCCESS);
}

static result drop_primary(struct device *device) {
    struct context *primary = device->primary;
    device->primary = NULL;
    device->retained = 0;
    /* A lost context stays, and stays lost. */
    if (primary->error) device->primary = primary;
    else destroy(primary);
    return SUCCESS;
}

API result cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER();
    struct device *of = device_of(device);
    NEED(of, INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    if (!of->retained) return unlock(INVALID_CONTEXT);
    return unlock(--of->retained ? SUCCESS : drop_primary(of));
}

API result cuDevicePrimaryCtxReset_v2(int device) {
    ENTER();
    struct device *of = device_of(device);
    NEED(of, INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    return unlock(of->primary ? drop_primary(of) : SUCCESS);
}

API result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    *flags = 0;
    *active = device_of(device)->primary != NULL;
    return unlock(SUCCESS);
}

API result cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    ENTER();
    (void)flags;
    return device_of(device) ? SUCCESS : INVALID_DEVICE;
}

static result push(struct context *ctx) {
    if (depth == MAX_DEPTH) return OUT_OF_MEMORY;
    stack[depth++] = ctx;
    return SUCCESS;
}

static result create(struct context **out, unsigned flags, int device) {
    NEED(out, INVALID_VALUE);
    NEED(device_of(device), INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    *out = new_context(device_of(device), flags);
    return unlock(push(*out));
}

API result cuCtxCreate_v2(struct context **out, unsigned flags, int device) {
    ENTER();
    return create(out, flags, device);
}

API result cuCtxCreate_v3(struct context **out, void *params, int count, unsigned flags, int device) {
    ENTER();
    (void)params;
    NEED(!count, NOT_SUPPORTED);
    return create(out, flags, device);
}

API result cuCtxCreate_v4(struct context **out, void *params, unsigned flags, int device) {
    ENTER();
    NEED(!params, NOT_SUPPORTED);
    return create(out, flags, device);
}

API result cuCtxDestroy_v2(struct context *ctx) {
    ENTER();
    NEED(is(ctx, CONTEXT), INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    if (ctx->destroyed || ctx == ctx->device->primary) return unlock(INVALID_CONTEXT);
    destroy(ctx);
    if (current() == ctx) depth--;
    return unlock(SUCCESS);
}

API result cuCtxPushCurrent_v2(struct context *ctx) {
    ENTER();
    NEED(is(ctx, CONTEXT), INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    return unlock(ctx->destroyed ? CONTEXT_IS_DESTROYED : push(ctx));
}

API result cuCtxPopCurrent_v2(struct context **out) {
    ENTER();
    NEED(depth, INVALID_CONTEXT);
    depth--;
    if (out) *out = stack[depth];
    return SUCCESS;
}

API result cuCtxSetCurrent(struct context *ctx) {
    ENTER();
    if (!ctx) {
        if (depth) depth--;
        return SUCCESS;
    }
    NEED(is(ctx, CONTEXT), INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    if (ctx->destroyed) return unlock(CONTEXT_IS_DESTROYED);
    if (!depth) return unlock(push(ctx));
    stack[depth - 1] = ctx;
    return unlock(SUCCESS);
}

API result cuCtxGetCurrent(struct context **out) {
    ENTER();
    *out = current();
    return SUCCESS;
}

API result cuCtxGetDevice(int *device) {
    ENTER();
    NEED(current(), INVALID_CONTEXT);
    *device = current()->device->ordinal;
    return SUCCESS;
}

API result cuCtxSynchronize(void) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    return state ? state : unlock(synchronize(ctx));
}

static result with_current(void) {
    struct context *ctx;
    result state = lock_current(&ctx);
    return state ? state : unlock(SUCCESS);
}

API result cuCtxGetApiVersion(struct context *ctx, unsigned *version) {
    ENTER();
    NEED(is(ctx ? ctx : current(), CONTEXT), INVALID_CONTEXT);
    *version = 3020;
    return SUCCESS;
}

API result cuCtxGetFlags(unsigned *flags) {
    ENTER();
    NEED(current(), INVALID_CONTEXT);
    *flags = current()->flags;
    return SUCCESS;
}

API result cuCtxSetFlags(unsigned flags) {
    ENTER();
    NEED(current(), INVALID_CONTEXT);
    current()->flags = flags;
    return SUCCESS;
}

API result cuCtxGetLimit(size_t *value, int limit) {
    ENTER();
    (void)limit;
    *value = 1 << 20;
    return with_current();
}

API result cuCtxSetLimit(int limit, size_t value) {
    ENTER();
    (void)limit, (void)value;
    return with_current();
}

API result cuCtxGetCacheConfig(int *value) {
    ENTER();
    *value = 0;
    return with_current();
}

API result cuCtxSetCacheConfig(int value) {
    ENTER();
    (void)value;
    return with_current();
}

API result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return with_current();
}

API result cuCtxEnablePeerAccess(struct context *peer, unsigned flags) {
    ENTER();
    NEED(!flags, INVALID_VALUE);
    NEED(is(peer, CONTEXT), INVALID_CONTEXT);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (peer == ctx || peer->destroyed) return unlock(INVALID_CONTEXT);
    if (peer->device == ctx->device || !config.peer) return unlock(PEER_ACCESS_UNSUPPORTED);
    if (has_peer(ctx, peer)) return unlock(PEER_ACCESS_ALREADY_ENABLED);
    if (ctx->peer_count == MAX_PEERS) return unlock(TOO_MANY_PEERS);
    ctx->peers[ctx->peer_count++] = peer;
    return unlock(SUCCESS);
}

API result cuCtxDisablePeerAccess(struct context *peer) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    for (int i = 0; i < ctx->peer_count; i++) {
        if (ctx->peers[i] != peer) continue;
        ctx->peers[i] = ctx->peers[--ctx->peer_count];
        return unlock(SUCCESS);
    }
    return unlock(PEER_ACCESS_NOT_ENABLED);
}

/* ---- Allocation ---- */

/* With the lock. */
static result allocate(address *out, size_t size, struct device *device, enum kind kind, struct context *ctx) {
    struct backing *backing;
    result made = new_backing(device, size, &backing);
    if (made) return made;
    address start = take_address(size, 512);
    if (!start) {
        put(backing);
        return OUT_OF_MEMORY;
    }
    new_range(start, size, kind, backing, ctx);
    *out = start;
    return SUCCESS;
}

API result cuMemAlloc_v2(address *out, size_t size) {
    ENTER();
    NEED(out && size, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    return state ? state : unlock(allocate(out, size, ctx->device, ALLOC, ctx));
}

/* The allocation that begins here. */
static struct range *to_free(address start) {
    struct range *range = range_at(start);
    bool fits = range && range->start == start && !range->freeing && (range->kind == ALLOC || range->kind == POOL);
    return fits ? range : NULL;
}

API result cuMemFree_v2(address start) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (!start) return unlock(SUCCESS);
    struct range *range = to_free(start);
    if (!range) return unlock(INVALID_VALUE);
    remove_range(range);
    return unlock(SUCCESS);
}

static result allocate_async(address *out, size_t size, struct pool *pool, void *stream_handle) {
    NEED(config.pools, NOT_SUPPORTED);
    NEED(out, INVALID_VALUE);
    struct stream *stream;
    result state = lock_stream(stream_handle, &stream);
    if (state) return state;
    *out = 0;
    /* cudarc's empty slices are made so. */
    if (!size) return unlock(SUCCESS);
    struct device *device = pool ? &devices[pool->device] : stream->ctx->device;
    return unlock(allocate(out, size, device, POOL, NULL));
}

API result cuMemAllocAsync(address *out, size_t size, void *stream) {
    ENTER();
    return allocate_async(out, size, NULL, stream);
}

API result cuMemAllocFromPoolAsync(address *out, size_t size, struct pool *pool, void *stream) {
    ENTER();
    NEED(is(pool, POOL_OF), INVALID_HANDLE);
    return allocate_async(out, size, pool, stream);
}

API result cuMemFreeAsync(address start, void *stream_handle) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(stream_handle, &stream);
    if (state) return state;
    if (!start) return unlock(SUCCESS);
    struct range *range = to_free(start);
    if (!range || range->kind != POOL) return unlock(INVALID_VALUE);
    range->freeing = true;
    struct work *work = new_work(FREE);
    work->range_id = range->id;
    submit(stream, work);
    return unlock(SUCCESS);
}

API result cuMemGetInfo_v2(size_t *left, size_t *total) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    *left = config.memory - ctx->device->used;
    *total = config.memory;
    return unlock(SUCCESS);
}

API result cuMemGetAddressRange_v2(address *base, size_t *size, address at) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at(at);
    if (!range) return unlock(NOT_FOUND);
    if (base) *base = range->start;
    if (size) *size = range->size;
    return unlock(SUCCESS);
}

/* ---- Pools: each device has its default one ---- */

static result default_pool(struct pool **out, int device) {
    NEED(device_of(device), INVALID_DEVICE);
    NEED(config.pools, NOT_SUPPORTED);
    *out = &devices[device].pool;
    return SUCCESS;
}

API result cuDeviceGetDefaultMemPool(struct pool **out, int device) {
    ENTER();
    return default_pool(out, device);
}

API result cuDeviceGetMemPool(struct pool **out, int device) {
    ENTER();
    return default_pool(out, device);
}

API result cuDeviceSetMemPool(int device, struct pool *pool) {
    ENTER();
    NEED(device_of(device), INVALID_DEVICE);
    return pool == &devices[device].pool ? SUCCESS : INVALID_VALUE;
}

API result cuMemPoolGetAttribute(struct pool *pool, int which, void *value) {
    ENTER();
    NEED(is(pool, POOL_OF) && value && which >= 1 && which <= 8, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    if (which <= 3) *(int *)value = 1;
    else *(uint64_t *)value = which == 4 ? pool->threshold : devices[pool->device].pooled;
    return unlock(SUCCESS);
}

API result cuMemPoolSetAttribute(struct pool *pool, int which, void *value) {
    ENTER();
    NEED(is(pool, POOL_OF) && value && which >= 1 && which <= 8, INVALID_VALUE);
    if (which == 4) pool->threshold = *(uint64_t *)value;
    return SUCCESS;
}

API result cuMemPoolTrimTo(struct pool *pool, size_t keep) {
    ENTER();
    (void)keep;
    return is(pool, POOL_OF) ? SUCCESS : INVALID_VALUE;
}

/* ---- Memory of the host ---- */

static result host_allocate(void **out, size_t size, unsigned flags) {
    NEED(out && size, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (bytes == MAP_FAILED) return unlock(OUT_OF_MEMORY);
    struct backing *backing = hold(bytes, size, ctx->device->ordinal, -1, ++last_id, true);
    /* Mapped is what all pinned memory is. */
    new_range((address)bytes, size, HOST, backing, ctx)->flags = flags | 2;
    *out = bytes;
    return unlock(SUCCESS);
}

API result cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    ENTER();
    NEED(flags <= 7, INVALID_VALUE);
    return host_allocate(out, size, flags);
}

API result cuMemAllocHost_v2(void **out, size_t size) {
    ENTER();
    return host_allocate(out, size, 0);
}

static result host_remove(void *start, enum kind kind, result otherwise) {
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at((address)start);
    if (!range || range->kind != kind || range->start != (address)start) return unlock(otherwise);
    remove_range(range);
    return unlock(SUCCESS);
}

API result cuMemFreeHost(void *start) {
    ENTER();
    NEED(start, INVALID_VALUE);
    return host_remove(start, HOST, INVALID_VALUE);
}

API result cuMemHostRegister_v2(void *start, size_t size, unsigned flags) {
    ENTER();
    NEED(start && size && (address)start + size > (address)start && !in_window((address)start), INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (overlaps((address)start, size)) return unlock(HOST_MEMORY_ALREADY_REGISTERED);
    struct backing *backing = hold(start, size, ctx->device->ordinal, -1, ++last_id, false);
    new_range((address)start, size, REGISTERED, backing, ctx)->flags = flags;
    return unlock(SUCCESS);
}

API result cuMemHostUnregister(void *start) {
    ENTER();
    NEED(start, INVALID_VALUE);
    return host_remove(start, REGISTERED, HOST_MEMORY_NOT_REGISTERED);
}

API result cuMemHostGetDevicePointer_v2(address *out, void *host, unsigned flags) {
    ENTER();
    NEED(out && !flags, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at((address)host);
    if (!range || !on_host(range)) return unlock(INVALID_VALUE);
    *out = (address)host;
    return unlock(SUCCESS);
}

API result cuMemHostGetFlags(unsigned *flags, void *host) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at((address)host);
    if (!range || range->kind != HOST) return unlock(INVALID_VALUE);
    *flags = range->flags;
    return unlock(SUCCESS);
}

/* ---- What is known of a pointer ---- */

static int put_u32(void *out, unsigned value) {
    memcpy(out, &value, sizeof value);
    return SUCCESS;
}

static int put_u64(void *out, uint64_t value) {
    memcpy(out, &value, sizeof value);
    return SUCCESS;
}

static result pointer_attribute(void *out, int which, address at, const struct range *range) {
    switch (which) {
    case 1: return put_u64(out, (uint64_t)range->ctx);
    case 2: return put_u32(out, on_host(range) ? 1 : 2);
    case 3: return put_u64(out, at);
    case 4: return on_host(range) ? put_u64(out, at) : INVALID_VALUE;
    case 6: case 8: return put_u32(out, 0); /* synchronous copies, managed */
    case 7: return put_u64(out, range->id);
    case 9: return put_u32(out, (unsigned)range->device);
    case 10: return put_u32(out, range->kind == ALLOC);
    case 11: case 19: return put_u64(out, range->start);
    case 12: case 18: return put_u64(out, range->size);
    case 13: return put_u32(out, 1);
    case 14: return put_u64(out, range->handle ? (uint64_t)range->handle->handle_types : 0);
    case 15: return put_u32(out, !on_host(range) && range->kind != POOL);
    case 16: return put_u32(out, 3);
    case 17: return put_u64(out, range->kind == POOL ? (uint64_t)&devices[range->device].pool : 0);
    case 20: return put_u64(out, range->backing->id);
    default: return INVALID_VALUE;
    }
}

#ifndef MODEL_ANCIENT
API result cuPointerGetAttribute(void *out, int which, address at) {
    ENTER();
    NEED(out, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    struct range *range = range_at(at);
    return unlock(range ? pointer_attribute(out, which, at, range) : INVALID_VALUE);
}
#endif

/* Bytes that an attribute has. */
static size_t width(int which) {
    switch (which) {
    case 2: case 6: case 8: case 9: case 10: case 13: case 15: case 16: return 4;
    default: return 8;
    }
}

/* Here an unknown pointer is no error: everything about it is zero. */
API result cuPointerGetAttributes(unsigned count, int *which, void **out, address at) {
    ENTER();
    NEED(which && out, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    struct range *range = range_at(at);
    for (unsigned i = 0; i < count; i++)
        if (!range || pointer_attribute(out[i], which[i], at, range)) memset(out[i], 0, width(which[i]));
    return unlock(SUCCESS);
}

API result cuPointerSetAttribute(const void *value, int which, address at) {
    ENTER();
    NEED(value && which == 6, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    return unlock(range_at(at) ? SUCCESS : INVALID_VALUE);
}

/* ---- Virtual memory management ---- */

struct location {
    int kind, id;
};

struct allocation_prop {
    int kind, handle_types;
    struct location location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};

struct access_desc {
    struct location location;
    int flags;
};

#ifndef MODEL_OLD
#define NEED_VMM() NEED(config.vmm, NOT_SUPPORTED)

static struct reservation *reservations;
static size_t reservation_count, reservation_room;

static bool whole_granules(size_t size) {
    return size && size % GRANULE == 0;
}

static struct handle *new_handle(struct backing *backing, int handle_types) {
    struct handle *handle = make(sizeof *handle, HANDLE);
    handle->refs = handle->users = 1;
    handle->backing = backing;
    handle->handle_types = handle_types;
    return handle;
}

static void put_handle(struct handle *handle) {
    if (--handle->refs) return;
    handle->object.magic = DEAD;
    put(handle->backing);
}

API result cuMemGetAllocationGranularity(size_t *granule, const struct allocation_prop *prop, int option) {
    ENTER();
    NEED_VMM();
    NEED(granule && prop && option >= 0 && option <= 1, INVALID_VALUE);
    NEED(prop->kind == 1 && prop->location.kind == 1 && device_of(prop->location.id), INVALID_VALUE);
    *granule = GRANULE;
    return SUCCESS;
}

API result cuMemCreate(uint64_t *out, size_t size, const struct allocation_prop *prop, unsigned long long flags) {
    ENTER();
    NEED_VMM();
    NEED(out && prop && !flags && whole_granules(size) && prop->kind == 1 && prop->location.kind == 1, INVALID_VALUE);
    struct device *device = device_of(prop->location.id);
    NEED(device, INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    /* It needs no context, but tells of one that is lost. */
    if (current() && state_of(current())) return unlock(state_of(current()));
    struct backing *backing;
    result made = new_backing(device, size, &backing);
    if (made) return unlock(made);
    *out = (uint64_t)new_handle(backing, prop->handle_types);
    return unlock(SUCCESS);
}

API result cuMemRelease(uint64_t handle) {
    ENTER();
    NEED_VMM();
    pthread_mutex_lock(&lock);
    if (!is((void *)handle, HANDLE)) return unlock(INVALID_VALUE);
    struct handle *of = (struct handle *)handle;
    if (!of->users) return unlock(INVALID_VALUE);
    of->users--;
    put_handle(of);
    return unlock(SUCCESS);
}

API result cuMemRetainAllocationHandle(uint64_t *out, void *at) {
    ENTER();
    NEED_VMM();
    pthread_mutex_lock(&lock);
    struct range *range = range_at((address)at);
    if (!range || range->kind != VMM) return unlock(INVALID_VALUE);
    range->handle->refs++;
    range->handle->users++;
    *out = (uint64_t)range->handle;
    return unlock(SUCCESS);
}

API result cuMemAddressReserve(address *out, size_t size, size_t align, address hint, unsigned long long flags) {
    ENTER();
    NEED_VMM();
    (void)hint;
    NEED(out && !flags && whole_granules(size) && (align & (align - 1)) == 0, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    address start = take_address(size, align > GRANULE ? align : GRANULE);
    if (!start) return unlock(OUT_OF_MEMORY);
    reservations = grow(reservations, &reservation_room, reservation_count, sizeof *reservations);
    reservations[reservation_count++] = (struct reservation){start, size};
    *out = start;
    return unlock(SUCCESS);
}

API result cuMemAddressFree(address start, size_t size) {
    ENTER();
    NEED_VMM();
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < reservation_count; i++) {
        if (reservations[i].start != start || reservations[i].size != size) continue;
        if (overlaps(start, size)) return unlock(INVALID_VALUE);
        reservations[i] = reservations[--reservation_count];
        give_address(start, size);
        return unlock(SUCCESS);
    }
    return unlock(INVALID_VALUE);
}

static bool reserved(address start, size_t size) {
    for (size_t i = 0; i < reservation_count; i++) {
        struct reservation in = reservations[i];
        if (start >= in.start && start - in.start < in.size && in.size - (start - in.start) >= size) return true;
    }
    return false;
}

API result cuMemMap(address start, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    ENTER();
    NEED_VMM();
    NEED(whole_granules(size) && start % GRANULE == 0 && !offset && !flags, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    if (!is((void *)handle, HANDLE)) return unlock(INVALID_VALUE);
    struct handle *of = (struct handle *)handle;
    if (!of->users || size > of->backing->size) return unlock(INVALID_VALUE);
    if (!reserved(start, size) || overlaps(start, size)) return unlock(INVALID_VALUE);
    of->backing->refs++;
    of->refs++;
    new_range(start, size, VMM, of->backing, NULL)->handle = of;
    return unlock(SUCCESS);
}

/* Whether mappings, and each as a whole, fill a range. */
static bool whole_mappings(address start, size_t size) {
    for (address at = start; at < start + size;) {
        struct range *range = range_at(at);
        if (!range || range->kind != VMM || range->start != at || range->size > start + size - at) return false;
        at += range->size;
    }
    return size > 0;
}

API result cuMemUnmap(address start, size_t size) {
    ENTER();
    NEED_VMM();
    pthread_mutex_lock(&lock);
    if (!whole_mappings(start, size)) return unlock(INVALID_VALUE);
    for (address at = start; at < start + size;) {
        struct range *range = range_at(at);
        struct handle *handle = range->handle;
        at += range->size;
        remove_range(range);
        put_handle(handle);
    }
    return unlock(SUCCESS);
}

static void set_access(struct range *range, const struct access_desc *desc) {
    unsigned bit = 1u << desc->location.id;
    range->readers = desc->flags & 1 ? range->readers | bit : range->readers & ~bit;
    range->writers = desc->flags == 3 ? range->writers | bit : range->writers & ~bit;
}

API result cuMemSetAccess(address start, size_t size, const struct access_desc *desc, size_t count) {
    ENTER();
    NEED_VMM();
    NEED(desc && count, INVALID_VALUE);
    for (size_t i = 0; i < count; i++) {
        NEED(desc[i].location.kind == 1 && desc[i].flags >= 0 && desc[i].flags <= 3, INVALID_VALUE);
        NEED(device_of(desc[i].location.id), INVALID_DEVICE);
    }
    pthread_mutex_lock(&lock);
    if (!whole_mappings(start, size)) return unlock(INVALID_VALUE);
    for (address at = start; at < start + size;) {
        struct range *range = range_at(at);
        for (size_t i = 0; i < count; i++) {
            if (desc[i].location.id != range->device && !config.peer) return unlock(PEER_ACCESS_UNSUPPORTED);
            set_access(range, &desc[i]);
        }
        at += range->size;
    }
    return unlock(SUCCESS);
}

API result cuMemGetAccess(unsigned long long *flags, const struct location *location, address at) {
    ENTER();
    NEED_VMM();
    NEED(flags && location && location->kind == 1, INVALID_VALUE);
    NEED(device_of(location->id), INVALID_DEVICE);
    pthread_mutex_lock(&lock);
    struct range *range = range_at(at);
    if (!range || range->kind != VMM) return unlock(INVALID_VALUE);
    *flags = (range->readers >> location->id & 1) | (range->writers >> location->id & 1) << 1;
    return unlock(SUCCESS);
}

API result cuMemExportToShareableHandle(void *out, uint64_t handle, int kind, unsigned long long flags) {
    ENTER();
    NEED_VMM();
    NEED(out && kind == 1 && !flags, INVALID_VALUE);
    pthread_mutex_lock(&lock);
    if (!is((void *)handle, HANDLE)) return unlock(INVALID_VALUE);
    struct handle *of = (struct handle *)handle;
    if (!of->users || !(of->handle_types & 1)) return unlock(INVALID_VALUE);
    int fd = fcntl(of->backing->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return unlock(OPERATING_SYSTEM);
    memcpy(out, &fd, sizeof fd);
    return unlock(SUCCESS);
}

API result cuMemGetHandleForAddressRange(void *out, address start, size_t size, int kind, unsigned long long flags) {
    ENTER();
    NEED(out && kind == 1 && flags <= 1 && size && start % 4096 == 0 && size % 4096 == 0, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at(start);
    if (!range || on_host(range) || range->kind == POOL) return unlock(INVALID_VALUE);
    if (round_up(range->size, 4096) - (start - range->start) < size) return unlock(INVALID_VALUE);
    int fd = fcntl(range->backing->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return unlock(OPERATING_SYSTEM);
    memcpy(out, &fd, sizeof fd);
    return unlock(SUCCESS);
}

/* ---- Writing values, flushing ---- */

static result write_value(void *stream_handle, address at, uint32_t value, unsigned flags) {
    NEED(config.write_value, NOT_SUPPORTED);
    NEED(at && at % 4 == 0 && flags <= 1, INVALID_VALUE);
    struct stream *stream;
    result state = lock_stream(stream_handle, &stream);
    if (state) return state;
    if (!range_at(at)) return unlock(INVALID_VALUE);
    struct work *work = new_work(WRITE);
    work->to.at = at;
    work->pattern = value;
    submit(stream, work);
    return unlock(SUCCESS);
}

API result cuStreamWriteValue32(void *stream, address at, uint32_t value, unsigned flags) {
    ENTER();
    return write_value(stream, at, value, flags);
}

API result cuStreamWriteValue32_v2(void *stream, address at, uint32_t value, unsigned flags) {
    ENTER();
    return write_value(stream, at, value, flags);
}

API result cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER();
    NEED(!target && (scope == 100 || scope == 200), INVALID_VALUE);
    NEED(config.flush_options & 1, NOT_SUPPORTED);
    return with_current();
}
#endif

/* ---- Memory of other processes ---- */

/* What a descriptor is, by the name of the memfd. */
static bool is_ours(int fd, int *device, unsigned long long *id, size_t *size) {
    char path[64], name[128];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, name, sizeof name - 1);
    struct stat stat;
    if (n < 0 || fstat(fd, &stat) || stat.st_size <= 0) return false;
    name[n] = 0;
    *size = (size_t)stat.st_size;
    return sscanf(name, "/memfd:cuda-model-%d-%llu", device, id) == 2 && device_of(*device);
}

/* The descriptor belongs to what is made. */
static struct backing *foreign_bytes(int fd, int device, size_t size, uint64_t id) {
    char *bytes = map_fd(fd, size);
    return bytes ? hold(bytes, size, device, fd, id, true) : NULL;
}

#ifndef MODEL_OLD
API result cuMemImportFromShareableHandle(uint64_t *out, void *os_handle, int kind) {
    ENTER();
    NEED_VMM();
    NEED(out && kind == 1, INVALID_VALUE);
    int device, given = (int)(intptr_t)os_handle;
    unsigned long long id;
    size_t size;
    NEED(is_ours(given, &device, &id, &size), INVALID_VALUE);
    int fd = fcntl(given, F_DUPFD_CLOEXEC, 0);
    NEED(fd >= 0, OPERATING_SYSTEM);
    pthread_mutex_lock(&lock);
    struct backing *backing = foreign_bytes(fd, device, size, id);
    if (!backing) {
        close(fd);
        return unlock(OUT_OF_MEMORY);
    }
    *out = (uint64_t)new_handle(backing, 1);
    return unlock(SUCCESS);
}
#endif

struct ipc_handle {
    union {
        struct {
            uint32_t magic;
            int pid, fd, device;
            uint64_t id, size;
        };
        char bytes[64];
    };
};

#define IPC_MAGIC 0x49504331u

API result cuIpcGetMemHandle(struct ipc_handle *out, address at) {
    ENTER();
    NEED(out, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at(at);
    /* As on an H200: only what cuMemAlloc gave. */
    if (!range || range->kind != ALLOC) return unlock(INVALID_VALUE);
    memset(out, 0, sizeof *out);
    out->magic = IPC_MAGIC;
    out->pid = getpid();
    out->fd = range->backing->fd;
    out->device = range->device;
    out->id = range->backing->id;
    out->size = range->size;
    return unlock(SUCCESS);
}

static struct range *opened_before(const struct ipc_handle *handle, const struct context *ctx) {
    for (size_t i = 0; i < range_count; i++) {
        struct range *range = ranges[i];
        if (range->kind == IPC && range->ctx == ctx && range->owner_pid == handle->pid && range->owner_id == handle->id)
            return range;
    }
    return NULL;
}

/* A descriptor of the memory, or -1 if its owner has freed it. */
static int open_foreign(const struct ipc_handle *handle) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle->pid, handle->fd);
    int device, fd = open(path, O_RDWR | O_CLOEXEC);
    unsigned long long id;
    size_t size;
    if (fd < 0 || (is_ours(fd, &device, &id, &size) && id == handle->id && size == handle->size)) return fd;
    close(fd);
    return -1;
}

/* With the lock. */
static result open_ipc(address *out, const struct ipc_handle *handle, struct context *ctx) {
    struct range *range = opened_before(handle, ctx);
    if (!range) {
        int fd = open_foreign(handle);
        NEED(fd >= 0, INVALID_HANDLE);
        struct backing *backing = foreign_bytes(fd, handle->device, handle->size, handle->id);
        address start = backing ? take_address(handle->size, GRANULE) : 0;
        if (!start) {
            if (backing) put(backing);
            else close(fd);
            return OUT_OF_MEMORY;
        }
        range = new_range(start, handle->size, IPC, backing, ctx);
        range->owner_pid = handle->pid;
        range->owner_id = handle->id;
    }
    range->opened++;
    *out = range->start;
    return SUCCESS;
}

API result cuIpcOpenMemHandle_v2(address *out, struct ipc_handle handle, unsigned flags) {
    ENTER();
    NEED(out && flags <= 1 && handle.magic == IPC_MAGIC && device_of(handle.device), INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    /* The real driver opens no handles of the process itself. */
    if (handle.pid == getpid()) return unlock(INVALID_CONTEXT);
    return unlock(open_ipc(out, &handle, ctx));
}

API result cuIpcCloseMemHandle(address start) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct range *range = range_at(start);
    if (!range || range->kind != IPC || range->start != start) return unlock(INVALID_VALUE);
    if (!--range->opened) remove_range(range);
    return unlock(SUCCESS);
}

/* ---- Streams ---- */

static result create_stream(struct stream **out, unsigned flags, int priority) {
    NEED(out && flags <= 1, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    *out = new_stream(ctx, flags);
    (*out)->priority = priority;
    return unlock(SUCCESS);
}

API result cuStreamCreate(struct stream **out, unsigned flags) {
    ENTER();
    return create_stream(out, flags, 0);
}

API result cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    ENTER();
    return create_stream(out, flags, priority);
}

/* What the stream has is still done. */
API result cuStreamDestroy_v2(struct stream *stream) {
    ENTER();
    pthread_mutex_lock(&lock);
    if (!is(stream, STREAM) || stream->closing || stream == stream->ctx->null) return unlock(INVALID_HANDLE);
    stream->closing = true;
    if (stream->started) pthread_cond_signal(&stream->wake);
    else unlink_stream(stream);
    return unlock(SUCCESS);
}

/* Whether a stream is done; for the null stream, whether all that it waits for are. */
static bool idle(const struct stream *stream) {
    if (stream->completed < stream->submitted) return false;
    if (stream != stream->ctx->null) return true;
    for (struct stream *other = stream->ctx->streams; other; other = other->next)
        if (blocking(other) && other->completed < other->submitted) return false;
    return true;
}

API result cuStreamQuery(void *handle) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    return state ? state : unlock(idle(stream) ? SUCCESS : NOT_READY);
}

API result cuStreamSynchronize(void *handle) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    /* A piece of work of its own, which waits for all that the stream's next would wait for. */
    return unlock(idle(stream) ? SUCCESS : wait_for(submit(stream, new_work(WAIT))));
}

API result cuStreamWaitEvent(void *handle, struct event *event, unsigned flags) {
    ENTER();
    NEED(flags <= 1, INVALID_VALUE);
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!is(event, EVENT)) return unlock(INVALID_HANDLE);
    if (reached(event->point)) return unlock(SUCCESS);
    struct work *work = new_work(WAIT);
    wait_before(work, event->point);
    submit(stream, work);
    return unlock(SUCCESS);
}

API result cuStreamGetCtx(void *handle, struct context **out) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    *out = stream->ctx;
    return unlock(SUCCESS);
}

API result cuStreamGetFlags(void *handle, unsigned *flags) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    *flags = stream->flags;
    return unlock(SUCCESS);
}

API result cuStreamGetPriority(void *handle, int *priority) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    *priority = stream->priority;
    return unlock(SUCCESS);
}

API result cuStreamIsCapturing(void *handle, int *status) {
    ENTER();
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    *status = 0;
    return unlock(SUCCESS);
}

API result cuLaunchHostFunc(void *handle, host_function call, void *data) {
    ENTER();
    NEED(call, INVALID_VALUE);
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    struct work *work = new_work(CALL);
    work->call = call;
    work->data = data;
    submit(stream, work);
    return unlock(SUCCESS);
}

/* ---- Events. Like the real ones, they are asked without a current context. ---- */

API result cuEventCreate(struct event **out, unsigned flags) {
    ENTER();
    NEED(out && flags <= 7, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    struct event *event = make(sizeof *event, EVENT);
    event->ctx = ctx;
    event->flags = flags;
    *out = event;
    return unlock(SUCCESS);
}

API result cuEventDestroy_v2(struct event *event) {
    ENTER();
    pthread_mutex_lock(&lock);
    if (!is(event, EVENT)) return unlock(INVALID_HANDLE);
    event->object.magic = DEAD;
    return unlock(SUCCESS);
}

static result record(struct event *event, void *handle) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!is(event, EVENT) || event->ctx != stream->ctx) return unlock(INVALID_HANDLE);
    struct work *work = new_work(RECORD);
    work->event = event;
    event->point = submit(stream, work);
    return unlock(SUCCESS);
}

API result cuEventRecord(struct event *event, void *stream) {
    ENTER();
    return record(event, stream);
}

API result cuEventRecordWithFlags(struct event *event, void *stream, unsigned flags) {
    ENTER();
    NEED(flags <= 1, INVALID_VALUE);
    return record(event, stream);
}

/* Takes the lock; keeps it only on success. */
static result lock_event(struct event *event) {
    pthread_mutex_lock(&lock);
    if (!is(event, EVENT)) return unlock(INVALID_HANDLE);
    result state = state_of(event->ctx);
    return state ? unlock(state) : SUCCESS;
}

API result cuEventQuery(struct event *event) {
    ENTER();
    result state = lock_event(event);
    return state ? state : unlock(reached(event->point) ? SUCCESS : NOT_READY);
}

API result cuEventSynchronize(struct event *event) {
    ENTER();
    result state = lock_event(event);
    if (state) return state;
    return unlock(event->point.stream ? wait_for(event->point) : SUCCESS);
}

static result elapsed(float *milliseconds, struct event *from, struct event *to) {
    result state = lock_event(from);
    if (state) return state;
    bool fit = is(to, EVENT) && to->ctx == from->ctx && !((from->flags | to->flags) & 2);
    if (!fit || !from->point.stream || !to->point.stream) return unlock(INVALID_HANDLE);
    if (!reached(from->point) || !reached(to->point)) return unlock(NOT_READY);
    *milliseconds = (float)((to->seconds - from->seconds) * 1e3);
    return unlock(SUCCESS);
}

API result cuEventElapsedTime(float *milliseconds, struct event *from, struct event *to) {
    ENTER();
    return elapsed(milliseconds, from, to);
}

API result cuEventElapsedTime_v2(float *milliseconds, struct event *from, struct event *to) {
    ENTER();
    return elapsed(milliseconds, from, to);
}

/* ---- Copies and filling ---- */

/* Memory of the host that is not pinned is touched by its plain address, and only while the call lasts. */
static bool pageable(const void *host, size_t bytes) {
    address at = (address)host;
    if (in_window(at)) return false;
    struct range *range = range_at(at);
    return !range || range->size - (at - range->start) < bytes;
}

static struct operand host_operand(const void *host, size_t bytes) {
    return pageable(host, bytes) ? (struct operand){.raw = (char *)host} : (struct operand){.at = (address)host};
}

static struct work *copy_work(struct operand to, struct operand from, size_t bytes) {
    struct work *work = new_work(COPY);
    work->to = to;
    work->from = from;
    work->bytes = bytes;
    return work;
}

/* Reads pageable memory while the call lasts, and without the lock. */
static void stage(struct work *work) {
    pthread_mutex_unlock(&lock);
    work->staging = malloc(work->bytes);
    if (!work->staging) abort();
    memcpy(work->staging, work->from.raw, work->bytes);
    work->from.raw = work->staging;
    pthread_mutex_lock(&lock);
}

/* With the lock, which it gives back. */
static result copy(struct stream *stream, struct operand to, struct operand from, size_t bytes, bool wait) {
    struct work *work = copy_work(to, from, bytes);
    if (from.raw && !wait) stage(work);
    /* It may have been lost meanwhile. */
    result state = state_of(stream->ctx);
    if (state) {
        free_work(work);
        return unlock(state);
    }
    struct point point = submit(stream, work);
    return unlock(wait || to.raw ? wait_for(point) : SUCCESS);
}

static result host_to_device(address to, const void *from, size_t bytes, void *handle, bool wait) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!bytes) return unlock(SUCCESS);
    if (!from) return unlock(INVALID_VALUE);
    return copy(stream, (struct operand){.at = to}, host_operand(from, bytes), bytes, wait);
}

static result device_to_host(void *to, address from, size_t bytes, void *handle, bool wait) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!bytes) return unlock(SUCCESS);
    if (!to) return unlock(INVALID_VALUE);
    return copy(stream, host_operand(to, bytes), (struct operand){.at = from}, bytes, wait);
}

static result device_to_device(address to, address from, size_t bytes, void *handle) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!bytes) return unlock(SUCCESS);
    return copy(stream, (struct operand){.at = to}, (struct operand){.at = from}, bytes, false);
}

API result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    ENTER();
    return host_to_device(to, from, bytes, stream, false);
}

API result cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) {
    ENTER();
    return host_to_device(to, from, bytes, NULL, true);
}

API result cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    ENTER();
    return device_to_host(to, from, bytes, stream, false);
}

API result cuMemcpyDtoH_v2(void *to, address from, size_t bytes) {
    ENTER();
    return device_to_host(to, from, bytes, NULL, true);
}

API result cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    ENTER();
    return device_to_device(to, from, bytes, stream);
}

/* Like the real one, it does not wait for the device; nor does cuMemset. */
API result cuMemcpyDtoD_v2(address to, address from, size_t bytes) {
    ENTER();
    return device_to_device(to, from, bytes, NULL);
}

API result cuMemcpyPeerAsync(address to, struct context *to_ctx, address from, struct context *from_ctx, size_t bytes,
                             void *stream) {
    ENTER();
    NEED(is(to_ctx, CONTEXT) && is(from_ctx, CONTEXT), INVALID_CONTEXT);
    pthread_mutex_lock(&lock);
    result state = state_of(to_ctx) ? state_of(to_ctx) : state_of(from_ctx);
    pthread_mutex_unlock(&lock);
    return state ? state : device_to_device(to, from, bytes, stream);
}

/* Either side may be anything. */
static result copy_any(address to, address from, size_t bytes, void *handle, bool wait) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!bytes) return unlock(SUCCESS);
    return copy(stream, host_operand((void *)to, bytes), host_operand((void *)from, bytes), bytes, wait);
}

API result cuMemcpyAsync(address to, address from, size_t bytes, void *stream) {
    ENTER();
    return copy_any(to, from, bytes, stream, false);
}

API result cuMemcpy(address to, address from, size_t bytes) {
    ENTER();
    return copy_any(to, from, bytes, NULL, true);
}

static result fill(address to, uint32_t pattern, size_t bytes, void *handle) {
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    if (!bytes) return unlock(SUCCESS);
    struct work *work = new_work(FILL);
    work->to.at = to;
    work->pattern = pattern;
    work->bytes = bytes;
    submit(stream, work);
    return unlock(SUCCESS);
}

API result cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) {
    ENTER();
    return fill(to, value * 0x01010101u, bytes, stream);
}

API result cuMemsetD8_v2(address to, unsigned char value, size_t bytes) {
    ENTER();
    return fill(to, value * 0x01010101u, bytes, NULL);
}

API result cuMemsetD32Async(address to, unsigned value, size_t count, void *stream) {
    ENTER();
    NEED(to % 4 == 0, INVALID_VALUE);
    return fill(to, value, count * 4, stream);
}

API result cuMemsetD32_v2(address to, unsigned value, size_t count) {
    ENTER();
    NEED(to % 4 == 0, INVALID_VALUE);
    return fill(to, value, count * 4, NULL);
}

/* ---- Modules and launches ---- */

static result load(struct module **out, const char *text) {
    NEED(out && text, INVALID_VALUE);
    const char *begin = text + strspn(text, " \t\r\n");
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (strncmp(begin, ".version", 8) && strncmp(begin, "//", 2)) return unlock(INVALID_PTX);
    struct module *module = make(sizeof *module, MODULE);
    module->ctx = ctx;
    module->text = strdup(begin);
    *out = module;
    return unlock(SUCCESS);
}

API result cuModuleLoadData(struct module **out, const void *image) {
    ENTER();
    return load(out, image);
}

API result cuModuleLoadDataEx(struct module **out, const void *image, unsigned count, void *options, void **values) {
    ENTER();
    (void)count, (void)options, (void)values;
    return load(out, image);
}

API result cuModuleLoad(struct module **out, const char *path) {
    ENTER();
    FILE *file = path ? fopen(path, "re") : NULL;
    NEED(file, FILE_NOT_FOUND);
    char *text = NULL;
    size_t room = 0;
    ssize_t n = getdelim(&text, &room, 0, file);
    fclose(file);
    result loaded = n < 0 ? INVALID_PTX : load(out, text);
    free(text);
    return loaded;
}

API result cuModuleUnload(struct module *module) {
    ENTER();
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (!is(module, MODULE)) return unlock(INVALID_HANDLE);
    module->object.magic = DEAD;
    free(module->text);
    module->text = NULL;
    return unlock(SUCCESS);
}

/* Whether the text has `.entry NAME(`. */
static bool has_entry(const char *text, const char *name) {
    size_t len = strlen(name);
    while ((text = strstr(text, ".entry"))) {
        text += strlen(".entry");
        const char *at = text + strspn(text, " \t\r\n");
        if (at == text || strncmp(at, name, len)) continue;
        at += len;
        if (at[strspn(at, " \t\r\n")] == '(') return true;
    }
    return false;
}

static int kernel_of(const char *name) {
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (!strcmp(kernels[i].name, name)) return (int)i;
    return -1;
}

API result cuModuleGetFunction(struct function **out, struct module *module, const char *name) {
    ENTER();
    NEED(out && name, INVALID_VALUE);
    struct context *ctx;
    result state = lock_current(&ctx);
    if (state) return state;
    if (!is(module, MODULE)) return unlock(INVALID_HANDLE);
    int kernel = kernel_of(name);
    if (kernel < 0 || !has_entry(module->text, name)) return unlock(NOT_FOUND);
    struct function *function = make(sizeof *function, FUNCTION);
    function->module = module;
    function->kernel = kernel;
    *out = function;
    return unlock(SUCCESS);
}

API result cuModuleGetGlobal_v2(address *out, size_t *bytes, struct module *module, const char *name) {
    ENTER();
    (void)out, (void)bytes, (void)name;
    return is(module, MODULE) ? NOT_FOUND : INVALID_HANDLE;
}

API result cuFuncGetAttribute(int *value, int which, struct function *function) {
    ENTER();
    NEED(is(function, FUNCTION), INVALID_HANDLE);
    NEED(value && which >= 0 && which < 16, INVALID_VALUE);
    static const int values[16] = {[0] = 1024, [4] = 32, [5] = 60, [6] = 90, [8] = 48 << 10, [9] = -1};
    *value = values[which];
    return SUCCESS;
}

API result cuFuncSetAttribute(struct function *function, int which, int value) {
    ENTER();
    (void)which, (void)value;
    return is(function, FUNCTION) ? SUCCESS : INVALID_HANDLE;
}

API result cuFuncSetCacheConfig(struct function *function, int value) {
    ENTER();
    (void)value;
    return is(function, FUNCTION) ? SUCCESS : INVALID_HANDLE;
}

static bool has_args(const struct function *function, void **params) {
    const unsigned char *sizes = kernels[function->kernel].sizes;
    for (int i = 0; sizes[i]; i++)
        if (!params || !params[i]) return false;
    return true;
}

static result launch(struct function *function, const unsigned *shape, void *handle, void **params) {
    for (int i = 0; i < 6; i++) NEED(shape[i], INVALID_VALUE);
    NEED((uint64_t)shape[3] * shape[4] * shape[5] <= 1024, INVALID_VALUE);
    NEED(is(function, FUNCTION), INVALID_HANDLE);
    NEED(has_args(function, params), INVALID_VALUE);
    struct stream *stream;
    result state = lock_stream(handle, &stream);
    if (state) return state;
    /* A kernel must be of the current context, and so must the stream; copies may be anywhere. */
    struct module *module = function->module;
    if (!is(module, MODULE) || module->ctx != current() || stream->ctx != current()) return unlock(INVALID_HANDLE);
    struct work *work = new_work(KERNEL);
    work->kernel = function->kernel;
    const unsigned char *sizes = kernels[function->kernel].sizes;
    for (int i = 0; sizes[i]; i++) memcpy(&work->args[i], params[i], sizes[i]);
    submit(stream, work);
    return unlock(SUCCESS);
}

API result cuLaunchKernel(struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, void *stream, void **params, void **extra) {
    ENTER();
    (void)shared;
    NEED(!extra, NOT_SUPPORTED);
    return launch(function, (unsigned[]){gx, gy, gz, bx, by, bz}, stream, params);
}

API result cuLaunchCooperativeKernel(struct function *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                     unsigned by, unsigned bz, unsigned shared, void *stream, void **params) {
    ENTER();
    (void)shared;
    return launch(function, (unsigned[]){gx, gy, gz, bx, by, bz}, stream, params);
}

API result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, struct function *function, int size,
                                                       size_t shared) {
    ENTER();
    (void)shared;
    NEED(is(function, FUNCTION) && size > 0, INVALID_VALUE);
    *blocks = 2048 / size;
    return SUCCESS;
}

API result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, struct function *function, int size,
                                                                size_t shared, unsigned flags) {
    ENTER();
    (void)shared, (void)flags;
    NEED(is(function, FUNCTION) && size > 0, INVALID_VALUE);
    *blocks = 2048 / size;
    return SUCCESS;
}

API result cuOccupancyMaxPotentialBlockSize(int *grid, int *block, struct function *function, void *shared_of,
                                            size_t shared, int limit) {
    ENTER();
    (void)shared_of, (void)shared;
    NEED(is(function, FUNCTION), INVALID_VALUE);
    *block = limit > 0 && limit < 1024 ? limit : 1024;
    *grid = 2 * 132;
    return SUCCESS;
}

API result cuProfilerStart(void) {
    ENTER();
    return with_current();
}

API result cuProfilerStop(void) {
    ENTER();
    return with_current();
}

/* ---- What cudarc can call, and the model does not have ---- */

#define UNSUPPORTED(name) \
    API result name(void) { \
        ENTER(); \
        return NOT_SUPPORTED; \
    }

UNSUPPORTED(cuIpcGetEventHandle)
UNSUPPORTED(cuIpcOpenEventHandle)
UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemAdvise_v2)
UNSUPPORTED(cuMemPrefetchAsync_v2)
UNSUPPORTED(cuMemPoolCreate)
UNSUPPORTED(cuMemPoolDestroy)
UNSUPPORTED(cuStreamAttachMemAsync)
UNSUPPORTED(cuStreamBeginCapture_v2)
UNSUPPORTED(cuStreamEndCapture)
UNSUPPORTED(cuGraphDestroy)
UNSUPPORTED(cuGraphExecDestroy)
UNSUPPORTED(cuGraphInstantiateWithFlags)
UNSUPPORTED(cuGraphLaunch)
UNSUPPORTED(cuGraphUpload)
UNSUPPORTED(cuImportExternalMemory)
UNSUPPORTED(cuDestroyExternalMemory)
UNSUPPORTED(cuExternalMemoryGetMappedBuffer)
UNSUPPORTED(cuOccupancyAvailableDynamicSMemPerBlock)
UNSUPPORTED(cuOccupancyMaxActiveClusters)
UNSUPPORTED(cuOccupancyMaxPotentialBlockSizeWithFlags)
UNSUPPORTED(cuOccupancyMaxPotentialClusterSize)
