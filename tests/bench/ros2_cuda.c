// The scheme of the ROS 2 CUDA backend (rosidl_buffer_backends) without ROS 2: ticks, sizes and figures as in `vmmfd bench stream`.
//
// Each block has a listening socket that gives its descriptor to every process that connects, a reference count in shared memory, and an
// inter-process event. Subscribers cache imports by block. A block is used again 100 ms after its publication, if its count is 0. A
// connected socket stands for the middleware. Arguments: bytes, publications, subscribers.
//
//   cc -O2 -pthread -I/usr/local/cuda/include ros2_cuda.c -L/usr/local/cuda/lib64/stubs -lcuda -o ros2_cuda
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCKS = 40, MOST = 64, TICK = 2000000, GRACE = 100000000, REFERENCES = 0, UID = 1 };

// `begun` is 0 in the last, and 1 in those of the warm-up.
struct description {
    uint64_t begun, size, uid;
    int pid, block;
    CUipcEventHandle event;
};

static struct block {
    CUdeviceptr address;
    CUevent event;
    atomic_ulong *shared;
    uint64_t published;
    int fd, listener;
} blocks[BLOCKS];
static CUstream stream;


static void check(int failed, const char *what) {
    if (failed) fprintf(stderr, "%s failed: %d\n", what, failed), exit(1);
}
#define DRIVER(call) check(call, #call)
#define SYSTEM(call) check((call) < 0, #call)

static uint64_t nanoseconds(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

// The address of a block's socket. Behind its first byte is the name of the block's shared memory.
static struct sockaddr_un name_of(int pid, int block) {
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    sprintf(name.sun_path + 1, "/cuda_vmm_%d_%d", pid, block);
    return name;
}

static atomic_ulong *shared_of(const char *name) {
    int fd = shm_open(name, O_RDWR | O_CREAT, 0666);
    SYSTEM(ftruncate(fd, 4096));
    void *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return close(fd), shared;
}

static void start(void) {
    CUcontext context;
    DRIVER(cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0));
    DRIVER(cuCtxSetCurrent(context));
    DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory, uint64_t size) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr address;
    DRIVER(cuMemAddressReserve(&address, size, 0, 0, 0));
    DRIVER(cuMemMap(address, size, 0, memory, 0));
    DRIVER(cuMemSetAccess(address, size, &access, 1));
    return address;
}

// Sends a descriptor, or receives one if `fd` is -1. Closes the socket.
static int pass(int peer, int fd) {
    char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 0;
    struct iovec data = {&byte, 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (fd < 0) {
        SYSTEM(recvmsg(peer, &message, MSG_CMSG_CLOEXEC));
        return close(peer), *(int *)CMSG_DATA(head);
    }
    head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof fd);
    *(int *)CMSG_DATA(head) = fd;
    SYSTEM(sendmsg(peer, &message, 0));
    return close(peer);
}

_Noreturn static void *give(void *argument) {
    for (struct block *block = argument;;) pass(accept(block->listener, NULL, NULL), block->fd);
}

static void create(struct block *block, uint64_t size) {
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemGenericAllocationHandle memory;
    struct sockaddr_un name = name_of(getpid(), block - blocks);
    pthread_t thread;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    DRIVER(cuMemCreate(&memory, size, &properties, 0));
    DRIVER(cuMemExportToShareableHandle(&block->fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    block->address = map(memory, size);
    DRIVER(cuEventCreate(&block->event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    block->shared = shared_of(name.sun_path + 1);
    SYSTEM(block->listener = socket(AF_UNIX, SOCK_STREAM, 0));
    SYSTEM(bind(block->listener, (struct sockaddr *)&name, sizeof name));
    SYSTEM(listen(block->listener, MOST));
    check(pthread_create(&thread, NULL, give, block), "pthread_create");
}

static void import(struct block *block, const struct description *of) {
    CUmemGenericAllocationHandle memory;
    struct sockaddr_un name = name_of(of->pid, of->block);
    int peer = socket(AF_UNIX, SOCK_STREAM, 0);
    SYSTEM(connect(peer, (struct sockaddr *)&name, sizeof name));
    int fd = pass(peer, -1);
    DRIVER(cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    block->address = map(memory, of->size);
    block->shared = shared_of(name.sun_path + 1);
}

// Writes the microseconds until the stream can use each publication.
_Noreturn static void follow(int line, double *times) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    start();
    SYSTEM(write(line, "", 1));
    for (struct description of; recv(line, &of, sizeof of, 0) == sizeof of && of.begun;) {
        struct block *block = &blocks[of.block];
        if (!block->address) import(block, &of);
        atomic_fetch_add(&block->shared[REFERENCES], 1);
        check(atomic_load(&block->shared[UID]) != of.uid, "the identity of the block");
        DRIVER(cuIpcOpenEventHandle(&block->event, of.event));
        DRIVER(cuStreamWaitEvent(stream, block->event, 0));
        if (of.begun > 1) *times++ = (nanoseconds(CLOCK_MONOTONIC) - of.begun) / 1e3;
        DRIVER(cuEventDestroy(block->event));
        atomic_fetch_sub(&block->shared[REFERENCES], 1);
    }
    exit(0);
}

static void publish(const int *lines, int subscribers, uint64_t begun, uint64_t size) {
    static uint64_t number;
    struct block *block = &blocks[number++ % BLOCKS];
    while (block->shared[REFERENCES] || nanoseconds(CLOCK_MONOTONIC) - block->published < GRACE) usleep(100);
    DRIVER(cuEventRecord(block->event, stream));
    block->shared[UID] = number;
    block->published = nanoseconds(CLOCK_MONOTONIC);
    for (int i = 0; i < subscribers; i++) {
        struct description of = {begun, size, number, getpid(), block - blocks, {{0}}};
        DRIVER(cuIpcGetEventHandle(&of.event, block->event));
        SYSTEM(send(lines[i], &of, sizeof of, 0));
    }
}

static int ascending(const void *one, const void *other) {
    return *(const double *)one < *(const double *)other ? -1 : 1;
}

int main(int argc, char **argv) {
    check(argc != 4, "usage: ros2_cuda BYTES PUBLICATIONS SUBSCRIBERS:");
    uint64_t size = strtoull(argv[1], NULL, 10);
    int count = atoi(argv[2]), subscribers = atoi(argv[3]), all = count * subscribers, lines[MOST], pair[2];
    double *times = mmap(NULL, sizeof *times * all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), cpu = 0;
    for (int i = 0; i < subscribers; i++) {
        SYSTEM(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
        if (fork() == 0) follow(pair[1], times + count * i);
        lines[i] = pair[0];
    }
    start();
    for (int i = 0; i < BLOCKS; i++) create(&blocks[i], size);
    for (int i = 0; i < subscribers; i++) SYSTEM(read(lines[i], pair, 1));
    for (int i = -2 * BLOCKS; i < 2 * count; i++) {
        uint64_t used = nanoseconds(CLOCK_PROCESS_CPUTIME_ID), begun = nanoseconds(CLOCK_MONOTONIC);
        if (i % 2 == 0) publish(lines, subscribers, i < 0 ? 1 : begun, size);
        int64_t rest = TICK - (int64_t)(nanoseconds(CLOCK_MONOTONIC) - begun);
        if (rest > 0) usleep(rest / 1000);
        used = nanoseconds(CLOCK_PROCESS_CPUTIME_ID) - used;
        if (i >= 0) cpu += i % 2 ? -(double)used : (double)used;
    }
    publish(lines, subscribers, 0, size);
    while (wait(NULL) > 0) {}
    for (int i = 0; i < BLOCKS; i++) shm_unlink(name_of(getpid(), i).sun_path + 1);
    qsort(times, all, sizeof *times, ascending);
    printf("scheme of the ROS 2 CUDA backend, %lu bytes, %d at once: median %.2f, p99 %.2f, publisher's CPU %.2f us\n", size,
           subscribers, times[(all + 1) / 2 - 1], times[(99 * all + 99) / 100 - 1], cpu / 1e3 / count);
}
