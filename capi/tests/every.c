/* Calls every function of the C library: every BACKEND BROKER. BROKER is the socket of a running broker.
   every gone BROKER PID ends this broker.
   every stream BACKEND ROLE PATH is another process of the tests of streams. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parts.h"

/* As in dlpack.h, version 1.1. */
struct DLManagedTensorVersioned {
    struct {
        uint32_t major, minor;
    } version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    struct {
        void *data;
        struct {
            int32_t device_type, device_id;
        } device;
        int32_t ndim;
        struct {
            uint8_t code, bits;
            uint16_t lanes;
        } dtype;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } dl_tensor;
};

static atomic_int lines;

static void count_line(enum vmmfd_level_t level, const char *message, void *context) {
    EXPECT(level >= VMMFD_LOG_ERROR && level <= VMMFD_LOG_DEBUG && strlen(message) > 0);
    atomic_fetch_add((atomic_int *)context, 1);
}

static void test_log(vmmfd_device_t *device) {
    EXPECT(strchr(vmmfd_library_version(), '.') != NULL);
    FAILS(VMMFD_INVALID, vmmfd_log_set(6, count_line, &lines));
    CHECK(vmmfd_log_set(VMMFD_LOG_DEBUG, count_line, &lines));
    /* A free can't return its error. */
    vmmfd_memory_free((vmmfd_memory_t *)device);
    EXPECT(atomic_load(&lines) == 1);
    CHECK(vmmfd_log_set(VMMFD_LOG_OFF, NULL, NULL));
    vmmfd_memory_free((vmmfd_memory_t *)device);
    EXPECT(atomic_load(&lines) == 1);
}

static vmmfd_device_t *test_device(const char *backend) {
    vmmfd_device_t *device, *other;
    vmmfd_device_info_t info = {.struct_size = sizeof info};
    uint32_t count;
    CHECK(vmmfd_device_count(backend, &count));
    EXPECT(count >= 1);
    CHECK(vmmfd_device_open(backend, NULL, &device));
    CHECK(vmmfd_device_info(device, &info));
    EXPECT(strcmp(info.backend, backend) == 0 && info.ordinal == 0 && info.fallback == NULL);
    EXPECT(info.granularity >= 4096 && strlen(info.name) > 0);
    CHECK(vmmfd_device_open(backend, info.uuid, &other));
    vmmfd_device_free(other);
    FAILS(VMMFD_INVALID, vmmfd_device_info(other, &info));
    EXPECT(info.backend == NULL);
    FAILS(VMMFD_INVALID, vmmfd_device_info(NULL, &info));
    FAILS(VMMFD_INVALID, vmmfd_device_info(device, NULL));
    FAILS(VMMFD_INVALID, vmmfd_device_open("gpu", NULL, &other));
    FAILS(VMMFD_INVALID, vmmfd_device_open(backend, "first", &other));
    FAILS(VMMFD_NOT_FOUND, vmmfd_device_open(backend, "99", &other));
    EXPECT(other == NULL);
    vmmfd_device_free(NULL);
    return device;
}

/* Structs of an older and a newer version of the header, and of a program that sets no size. */
static void test_sizes(const vmmfd_device_t *device) {
    struct {
        vmmfd_memory_options_t known;
        uint64_t later;
    } options = {.known = {VMMFD_MEMORY_OPTIONS}};
    struct {
        vmmfd_memory_info_t known;
        uint64_t later;
    } info = {.known = {.struct_size = sizeof info}, .later = 7};
    vmmfd_memory_t *memory;
    EXPECT(VMMFD_VERSION_MAJOR * 100 + VMMFD_VERSION_MINOR >= 1 && VMMFD_VERSION_PATCH >= 0);
    options.known.struct_size = sizeof options;
    CHECK(vmmfd_memory_create(device, 1, &options.known, &memory));
    CHECK(vmmfd_memory_info(memory, &info.known));
    EXPECT(info.known.struct_size == sizeof info && info.known.size == 1 && info.later == 0);
    info.known.struct_size = 8;
    FAILS(VMMFD_INVALID, vmmfd_memory_info(memory, &info.known));
    vmmfd_memory_free(memory);
    options.later = 1;
    FAILS(VMMFD_UNSUPPORTED, vmmfd_memory_create(device, 1, &options.known, &memory));
    options.later = 0;
    const size_t wrong[] = {0, 8, 1 << 20, SIZE_MAX};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        options.known.struct_size = wrong[i];
        FAILS(VMMFD_INVALID, vmmfd_memory_create(device, 1, &options.known, &memory));
    }
    EXPECT(memory == NULL);
}

static void test_memory(const vmmfd_device_t *device) {
    const char text[] = "shared";
    char bytes[sizeof text] = "";
    vmmfd_memory_t *memory, *imported;
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    vmmfd_memory_options_t options = {VMMFD_MEMORY_OPTIONS, .chunk = 1, .rdma = VMMFD_RDMA_NEVER};
    CHECK(vmmfd_memory_create(device, 1, &options, &memory));
    CHECK(vmmfd_memory_info(memory, &info));
    EXPECT(info.size == 1 && info.writable && info.segments == 1 && info.mapped_size > 1 && info.address > 0);
    vmmfd_memory_free(memory);
    CHECK(vmmfd_memory_create(device, info.mapped_size + 1, &options, &memory));
    CHECK(vmmfd_memory_info(memory, &info));
    EXPECT(info.segments == 2);
    CHECK(vmmfd_memory_copy_in(memory, info.size - sizeof text, text, sizeof text));
    CHECK(vmmfd_memory_synchronize(memory));
    int fds[2];
    uint64_t sizes[2];
    for (uint64_t at = 0; at < 2; at++)
        CHECK(vmmfd_memory_export(memory, at, &fds[at], &sizes[at]));
    FAILS(VMMFD_INVALID, vmmfd_memory_export(memory, 2, &(int){0}, &(uint64_t){0}));
    CHECK(vmmfd_memory_import(device, fds, sizes, 2, false, &imported));
    for (int at = 0; at < 2; at++)
        EXPECT(close(fds[at]) == 0);
    FAILS(VMMFD_INVALID, vmmfd_memory_import(device, fds, sizes, 2, false, &imported));
    FAILS(VMMFD_INVALID, vmmfd_memory_import(device, &(int){-1}, sizes, 1, false, &imported));
    FAILS(VMMFD_INVALID, vmmfd_memory_import(device, NULL, sizes, 1, false, &imported));
    FAILS(VMMFD_INVALID, vmmfd_memory_import(device, fds, sizes, SIZE_MAX, false, &imported));
    EXPECT(imported == NULL);
    vmmfd_memory_free(memory);
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_out(memory, 0, bytes, 1));
    CHECK(vmmfd_memory_create(device, 64, NULL, &memory));
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_out(memory, 63, bytes, 2));
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_out(memory, 0, NULL, 2));
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_in((vmmfd_memory_t *)device, 0, bytes, 1));
    FAILS(VMMFD_INVALID, vmmfd_memory_create(device, 0, NULL, &imported));
    options.placement = 9;
    FAILS(VMMFD_INVALID, vmmfd_memory_create(device, 1, &options, &imported));
    vmmfd_memory_free(memory);
}

/* Memory that other code allocated: of its own allocator in CUDA tests; ordinary memory has no descriptor. */
static void test_address(const vmmfd_device_t *device) {
    vmmfd_memory_t *memory = (vmmfd_memory_t *)device;
    uint64_t offset = 7;
    char bytes[4] = "";
    FAILS(VMMFD_UNSUPPORTED, vmmfd_memory_at(device, (uintptr_t)bytes, sizeof bytes, true, &memory, &offset));
    EXPECT(memory == NULL && offset == 0);
    FAILS(VMMFD_INVALID, vmmfd_memory_at(device, (uintptr_t)bytes, 0, true, &memory, &offset));
    FAILS(VMMFD_INVALID, vmmfd_memory_at(device, UINT64_MAX, 2, true, &memory, &offset));
    FAILS(VMMFD_INVALID, vmmfd_memory_at(device, 4096, 1, true, &memory, NULL));
    FAILS(VMMFD_INVALID, vmmfd_memory_at(NULL, 4096, 1, true, &memory, &offset));
}

static void test_import(const vmmfd_device_t *device) {
    vmmfd_memory_t *memory, *imported;
    vmmfd_memory_info_t info = {.struct_size = sizeof info};
    char bytes[4] = "";
    int fd;
    uint64_t size;
    CHECK(vmmfd_memory_create(device, 4, NULL, &memory));
    CHECK(vmmfd_memory_copy_in(memory, 0, "four", 4));
    CHECK(vmmfd_memory_export(memory, 0, &fd, &size));
    CHECK(vmmfd_memory_import(device, &fd, &size, 1, false, &imported));
    close(fd);
    vmmfd_memory_free(memory);
    CHECK(vmmfd_memory_info(imported, &info));
    EXPECT(!info.writable && info.size == size && info.segments == 0);
    CHECK(vmmfd_memory_copy_out(imported, 0, bytes, 4));
    EXPECT(memcmp(bytes, "four", 4) == 0);
    FAILS(VMMFD_INVALID, vmmfd_memory_copy_in(imported, 0, bytes, 4));
    FAILS(VMMFD_INVALID, vmmfd_memory_export(imported, 0, &fd, &size));
    EXPECT(fd == -1);
    vmmfd_memory_free(imported);
}

static int deleted;

static void count_deletion(struct DLManagedTensorVersioned *tensor) {
    (void)tensor;
    deleted++;
}

/* A tensor of this program is copied, transposed, and exported again. */
static void test_array(const vmmfd_device_t *device) {
    uint32_t values[6] = {0, 1, 2, 3, 4, 5}, back[6] = {0};
    int64_t shape[2] = {3, 2}, strides[2] = {1, 3};
    struct DLManagedTensorVersioned own = {.version = {1, 0}, .deleter = count_deletion}, *tensor;
    own.dl_tensor.data = values;
    own.dl_tensor.device.device_type = 1;
    own.dl_tensor.ndim = 2;
    own.dl_tensor.dtype.code = 1;
    own.dl_tensor.dtype.bits = 32;
    own.dl_tensor.dtype.lanes = 1;
    own.dl_tensor.shape = shape;
    own.dl_tensor.strides = strides;
    vmmfd_array_t *array, *copy;
    vmmfd_memory_t *memory;
    vmmfd_layout_t layout = {.struct_size = sizeof layout};
    CHECK(vmmfd_array_from_dlpack(device, &own, &array));
    CHECK(vmmfd_array_info(array, &layout));
    EXPECT(deleted == 1 && layout.dimensions == 2 && layout.shape[0] == 3 && layout.strides[0] == 8);
    CHECK(vmmfd_array_memory(array, &memory));
    CHECK(vmmfd_memory_copy_out(memory, 0, back, sizeof back));
    EXPECT(memcmp(back, (uint32_t[]){0, 3, 1, 4, 2, 5}, sizeof back) == 0);
    CHECK(vmmfd_array_to_dlpack(array, &tensor));
    vmmfd_array_free(array);
    vmmfd_memory_free(memory);
    vmmfd_device_info_t info = {.struct_size = sizeof info};
    CHECK(vmmfd_device_info(device, &info));
    EXPECT(tensor->version.major == 1 && tensor->flags == 0 && tensor->dl_tensor.ndim == 2);
    EXPECT(tensor->dl_tensor.device.device_type == (strcmp(info.backend, "cuda") == 0 ? 2 : 1));
    EXPECT(tensor->dl_tensor.strides[0] == 2 && tensor->dl_tensor.strides[1] == 1);
    /* The import frees the tensor, and with it the memory. */
    CHECK(vmmfd_array_from_dlpack(device, tensor, &copy));
    CHECK(vmmfd_array_memory(copy, &memory));
    CHECK(vmmfd_memory_copy_out(memory, 4, back, 4));
    EXPECT(back[0] == 3);
    const uint64_t large[1] = {1 << 30};
    layout = (vmmfd_layout_t){.struct_size = sizeof layout, .dtype = "float32", .dimensions = 1, .shape = large};
    FAILS(VMMFD_INVALID, vmmfd_array_create(memory, &layout, &array));
    layout.dtype = "string";
    FAILS(VMMFD_INVALID, vmmfd_array_create(memory, &layout, &array));
    FAILS(VMMFD_INVALID, vmmfd_array_create(memory, NULL, &array));
    layout = (vmmfd_layout_t){.struct_size = sizeof layout, .dtype = "uint8", .shape = large};
    for (int bits = 32; bits < 64; bits += 8) {
        layout.dimensions = (size_t)1 << bits;
        FAILS(VMMFD_INVALID, vmmfd_array_create(memory, &layout, &array));
    }
    own.dl_tensor.data = NULL;
    FAILS(VMMFD_INVALID, vmmfd_array_from_dlpack(device, &own, &array));
    own.dl_tensor.data = values;
    own.dl_tensor.dtype.lanes = 4;
    FAILS(VMMFD_UNSUPPORTED, vmmfd_array_from_dlpack(device, &own, &array));
    own.version.major = 2;
    FAILS(VMMFD_INVALID, vmmfd_array_from_dlpack(device, &own, &array));
    EXPECT(deleted == 4);
    FAILS(VMMFD_INVALID, vmmfd_array_from_dlpack(device, NULL, &array));
    /* DLPack has no raw bytes. */
    layout = (vmmfd_layout_t){.struct_size = sizeof layout, .dtype = "|V3", .dimensions = 0, .offset = 0};
    CHECK(vmmfd_array_create(memory, &layout, &array));
    FAILS(VMMFD_UNSUPPORTED, vmmfd_array_to_dlpack(array, &tensor));
    vmmfd_array_free(array);
    vmmfd_array_free(copy);
    vmmfd_memory_free(memory);
}

struct service {
    const vmmfd_array_t *array;
    const char *path;
    vmmfd_handoff_options_t options;
    uint64_t served;
};

static void *serve(void *given) {
    struct service *service = given;
    CHECK(vmmfd_handoff_serve(service->path, service->array, &service->options, &service->served));
    return NULL;
}

static void test_handoff(const vmmfd_device_t *device) {
    int pair[2];
    pthread_t thread;
    vmmfd_array_t *array = numbers(device, 1000, 7), *taken;
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    struct service service = {.array = array, .options = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 20000}};
    service.options.socket = pair[0];
    EXPECT(pthread_create(&thread, NULL, serve, &service) == 0);
    vmmfd_handoff_options_t options = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 20000, .writable = true};
    options.socket = pair[1];
    CHECK(vmmfd_handoff_take(device, NULL, &options, &taken));
    EXPECT(pthread_join(thread, NULL) == 0 && service.served == 1);
    /* One handoff for each socket. */
    FAILS(VMMFD_DISCONNECTED, vmmfd_handoff_take(device, NULL, &options, &(vmmfd_array_t *){NULL}));
    EXPECT(close(pair[0]) == 0 && close(pair[1]) == 0);
    EXPECT(number(taken, 999) == 1006);
    FAILS(VMMFD_INVALID, vmmfd_handoff_serve(NULL, taken, NULL, NULL));
    FAILS(VMMFD_INVALID, vmmfd_handoff_take(device, NULL, &options, &(vmmfd_array_t *){NULL}));
    vmmfd_array_free(taken);

    char folder[] = "/tmp/vmmfd-every-XXXXXX", path[64];
    EXPECT(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/socket", folder);
    int stop = eventfd(0, EFD_CLOEXEC);
    service = (struct service){.array = array, .path = path};
    service.options = (vmmfd_handoff_options_t){VMMFD_HANDOFF_OPTIONS, .consumers = VMMFD_ANY_NUMBER};
    service.options.stop = stop;
    EXPECT(pthread_create(&thread, NULL, serve, &service) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(vmmfd_handoff_take(i == 0 ? device : NULL, path, NULL, &taken));
        EXPECT(number(taken, 0) == 7);
        vmmfd_array_free(taken);
    }
    EXPECT(eventfd_write(stop, 1) == 0 && pthread_join(thread, NULL) == 0);
    EXPECT(service.served == 2 && close(stop) == 0);
    options = (vmmfd_handoff_options_t){VMMFD_HANDOFF_OPTIONS, .timeout_ms = 50};
    FAILS(VMMFD_NOT_FOUND, vmmfd_handoff_take(device, path, &options, &taken));
    FAILS(VMMFD_TIMEOUT, vmmfd_handoff_serve(path, array, &options, NULL));
    EXPECT(taken == NULL);
    vmmfd_array_free(array);
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    EXPECT(system(command) == 0);
}

/* Options and paths that would have no effect. */
static void test_unused_options(const vmmfd_device_t *device) {
    const char *path = "/tmp/vmmfd-every-unused";
    int pair[2];
    vmmfd_array_t *array = numbers(device, 1, 0), *taken;
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    vmmfd_handoff_options_t options = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 50, .writable = true};
    FAILS(VMMFD_INVALID, vmmfd_handoff_serve(path, array, &options, NULL));
    options.writable = false;
    options.consumers = 1;
    FAILS(VMMFD_INVALID, vmmfd_handoff_take(device, path, &options, &taken));
    options.socket = pair[0];
    FAILS(VMMFD_INVALID, vmmfd_handoff_serve(NULL, array, &options, NULL));
    options.consumers = 0;
    FAILS(VMMFD_INVALID, vmmfd_handoff_serve(path, array, &options, NULL));
    FAILS(VMMFD_INVALID, vmmfd_handoff_take(device, path, &options, &taken));
    EXPECT(taken == NULL && close(pair[0]) == 0 && close(pair[1]) == 0);
    vmmfd_array_free(array);
}

/* A send to a peer that has died is an error, not a SIGPIPE, which this program does not ignore. */
static void test_dead_peer(const vmmfd_device_t *device) {
    int pair[2], status;
    EXPECT(signal(SIGPIPE, SIG_DFL) == SIG_DFL);
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t peer = fork();
    if (peer == 0) {
        execlp("true", "true", NULL);
        _exit(1);
    }
    EXPECT(peer > 0 && close(pair[0]) == 0 && waitpid(peer, &status, 0) == peer && status == 0);
    vmmfd_handoff_options_t options = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 20000};
    options.socket = pair[1];
    FAILS(VMMFD_DISCONNECTED, vmmfd_handoff_take(device, NULL, &options, &(vmmfd_array_t *){NULL}));
    EXPECT(close(pair[1]) == 0);
}

/* Handles of the parent are an error in a fork, and the fork can open a device of the host backend for itself. */
static void test_fork(vmmfd_device_t *device) {
    vmmfd_array_t *array = numbers(device, 4, 1);
    pid_t child = fork();
    if (child == 0) {
        vmmfd_layout_t layout = {.struct_size = sizeof layout};
        vmmfd_device_t *own;
        FAILS(VMMFD_FORKED, vmmfd_array_info(array, &layout));
        vmmfd_array_free(array);
        CHECK(vmmfd_device_open("host", NULL, &own));
        vmmfd_array_t *other = numbers(own, 4, 9);
        EXPECT(number(other, 3) == 12);
        vmmfd_array_free(other);
        vmmfd_device_free(own);
        /* Not an exit, at which valgrind reports the parent's objects: a fork does not free them. */
        execlp("true", "true", NULL);
        _exit(1);
    }
    int status;
    EXPECT(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    EXPECT(number(array, 3) == 4);
    vmmfd_array_free(array);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "gone") == 0) {
        test_gone(argv[2], atoi(argv[3]));
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "stream") == 0) {
        be_stream_peer(argv[2], argv[3], argv[4]);
        return 0;
    }
    EXPECT(argc == 3);
    vmmfd_device_t *device = test_device(argv[1]);
    test_log(device);
    test_sizes(device);
    test_memory(device);
    test_address(device);
    test_import(device);
    test_array(device);
    test_handoff(device);
    test_unused_options(device);
    test_dead_peer(device);
    test_fork(device);
    test_stream(device, argv[1], argv[0], argv[2]);
    test_order(device, strcmp(argv[1], "host") != 0);
    test_broker(device, argv[2]);
    vmmfd_device_free(device);
    printf("every: %s passed\n", argv[1]);
}
