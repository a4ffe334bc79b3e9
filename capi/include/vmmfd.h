/* The C library of vmmfd: GPU memory handed from one process to another. See docs/c.md.
 *
 *     vmmfd_device_t *device;
 *     vmmfd_array_t *array;
 *     vmmfd_handoff_options_t options = {VMMFD_HANDOFF_OPTIONS, .timeout_ms = 5000};
 *     vmmfd_error_t *error = vmmfd_device_open(NULL, NULL, &device);
 *     if (error == NULL)
 *         error = vmmfd_handoff_take(device, "/run/user/1000/camera.sock", &options, &array);
 *     if (error != NULL)
 *         fprintf(stderr, "%s\n", error->message);
 *     vmmfd_error_free(error);
 *
 * - Errors: a function that can fail returns NULL, or an error that the caller frees with vmmfd_error_free. errno has no
 *   meaning afterwards. After an error, results are NULL, 0 or -1.
 * - Free functions accept NULL and do not fail: a handle that is not valid is reported in the log. Each handle and result is freed once.
 * - Texts are UTF-8 and end with a null character.
 * - Structs of options and facts start with struct_size, so that later versions can add fields at the end. Options start with the macro
 *   that is named like their type, as above; the fields after it are optional. An option that the call does not use is VMMFD_INVALID.
 *   Facts start with `.struct_size = sizeof` the variable.
 * - Time limits are in milliseconds. 0 is the default that the field states, and VMMFD_FOREVER never passes.
 * - Descriptors: -1 is none. The library's own are close-on-exec and never 0, 1 or 2.
 * - Threads: any thread may call any function at any time, except where the function states otherwise.
 * - Signals: a handler may interrupt any call, which continues afterwards (EINTR is not an error). No function is async-signal-safe: to
 *   end a wait, a handler writes to an eventfd(2) that the options name as `stop`. No call raises SIGPIPE.
 * - fork(2): a call with a handle of the parent process returns VMMFD_FORKED. The child's first call closes its copies of the parent's
 *   connections to brokers.
 * - Memory: if malloc(3) fails inside the library, it prints a line and aborts the process. A lack of device memory is an error.
 *
 * Generated from capi/src by `UPDATE_DOCS=1 cargo test -p vmmfd-capi`. Do not edit. */

#ifndef VMMFD_H
#define VMMFD_H

#define VMMFD_VERSION_MAJOR 0
#define VMMFD_VERSION_MINOR 1
#define VMMFD_VERSION_PATCH 0

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__) || defined(__clang__)
#define VMMFD_MUST_USE __attribute__((warn_unused_result))
#else
#define VMMFD_MUST_USE
#endif

/* The struct of dlpack.h, version 1.0 or newer. */
typedef struct DLManagedTensorVersioned DLManagedTensorVersioned;

/* The first fields of options: vmmfd_put_options_t options = {VMMFD_PUT_OPTIONS, .mode = 0644};
 * They include `socket` and `stop`, which are none: assign `socket` and `stop` afterwards. */
#define VMMFD_MEMORY_OPTIONS .struct_size = sizeof(vmmfd_memory_options_t)
#define VMMFD_HANDOFF_OPTIONS .struct_size = sizeof(vmmfd_handoff_options_t), .socket = -1, .stop = -1
#define VMMFD_PUBLISHER_OPTIONS .struct_size = sizeof(vmmfd_publisher_options_t), .stop = -1
#define VMMFD_SUBSCRIBER_OPTIONS .struct_size = sizeof(vmmfd_subscriber_options_t), .socket = -1, .stop = -1
#define VMMFD_BROKER_OPTIONS .struct_size = sizeof(vmmfd_broker_options_t), .stop = -1
#define VMMFD_PUT_OPTIONS .struct_size = sizeof(vmmfd_put_options_t)
#define VMMFD_GET_OPTIONS .struct_size = sizeof(vmmfd_get_options_t)


#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* ---- Handles ---- */

/*
 An array in memory: type, shape, strides and offset. It keeps its memory. Any threads may use it at once.
 */
typedef struct vmmfd_array_t vmmfd_array_t;

/*
 A connection to a broker. Any threads may use it at once: it carries one request at a time, and a get that waits is paused for the
 requests of other threads.
 */
typedef struct vmmfd_broker_t vmmfd_broker_t;

/*
 A device: a GPU, or the host backend's ordinary memory. Any threads may use it at once.
 */
typedef struct vmmfd_device_t vmmfd_device_t;

/*
 A lease: an object that this process has mapped read-only, and that the broker keeps. Any threads may use it at once.
 */
typedef struct vmmfd_lease_t vmmfd_lease_t;

/*
 Memory at addresses of this process. Any threads may use it at once; other processes may change its bytes at any time.
 */
typedef struct vmmfd_memory_t vmmfd_memory_t;

/*
 A version that is imported and takes the addresses of a lease at the switch.
 */
typedef struct vmmfd_prepared_t vmmfd_prepared_t;

/*
 A publisher: it passes buffers of one pool to any number of subscribers. Any threads may use it at once.
 */
typedef struct vmmfd_publisher_t vmmfd_publisher_t;

/*
 A subscriber of a stream, or of the streams of topics. Any threads may use it at once.
 */
typedef struct vmmfd_subscriber_t vmmfd_subscriber_t;

/*
 A number that streams of one process raise, and that streams and threads of any process wait for. Any threads may use it at once.
 */
typedef struct vmmfd_timeline_t vmmfd_timeline_t;

/*
 A watch of names. One thread may use it at a time.
 */
typedef struct vmmfd_watch_t vmmfd_watch_t;

/* ---- Errors, version and log ---- */

/*
 A time limit that never passes.
 */
#define VMMFD_FOREVER UINT64_MAX

/*
 The class of an error, to branch on.
 */
typedef enum vmmfd_code_t {
    /*
     An argument or handle is not valid, or the state of the object does not allow the call. Nothing was changed.
     */
    VMMFD_INVALID = 1,
    /*
     The object, device, array, producer or broker does not exist.
     */
    VMMFD_NOT_FOUND = 2,
    /*
     An object of that name exists.
     */
    VMMFD_EXISTS = 3,
    /*
     The object differs from the caller's expectation.
     */
    VMMFD_DIFFERS = 4,
    /*
     This user lacks the permission.
     */
    VMMFD_DENIED = 5,
    /*
     The time that the caller allowed has passed.
     */
    VMMFD_TIMEOUT = 6,
    /*
     The peer is gone or silent, or broke the protocol.
     */
    VMMFD_DISCONNECTED = 7,
    /*
     The device or the machine has too little memory.
     */
    VMMFD_OUT_OF_MEMORY = 8,
    /*
     This machine, driver or device does not support the operation.
     */
    VMMFD_UNSUPPORTED = 9,
    /*
     The caller stopped the call.
     */
    VMMFD_INTERRUPTED = 10,
    /*
     This process is a fork of the process that made the handle or initialised the driver.
     */
    VMMFD_FORKED = 11,
    /*
     A driver call failed: `driver_code` is its code.
     */
    VMMFD_DRIVER = 12,
    /*
     A system call failed, or the broker has reached a limit.
     */
    VMMFD_SYSTEM = 13,
    /*
     A defect of this library. The objects of the call may be unusable.
     */
    VMMFD_INTERNAL = 14,
} vmmfd_code_t;

/*
 The level of a log line.
 */
typedef enum vmmfd_level_t {
    /*
     No line: the hook is not called.
     */
    VMMFD_LOG_OFF = 0,
    /*
     A failure that no call reports, such as a failure to release memory.
     */
    VMMFD_LOG_ERROR = 1,
    /*
     A problem that the library handles.
     */
    VMMFD_LOG_WARN = 2,
    /*
     Rare events.
     */
    VMMFD_LOG_INFO = 3,
    /*
     Each record to and from a peer.
     */
    VMMFD_LOG_DEBUG = 4,
    /*
     Everything.
     */
    VMMFD_LOG_TRACE = 5,
} vmmfd_level_t;

/*
 An error. The caller frees it with `vmmfd_error_free`, which also frees the texts.
 */
typedef struct vmmfd_error_t {
    /*
     The class of the error.
     */
    enum vmmfd_code_t code;
    /*
     The `CUresult` of the driver call that failed; 0 if no driver call failed.
     */
    uint32_t driver_code;
    /*
     The problem in one sentence, with the values. UTF-8.
     */
    const char *message;
    /*
     The next step in one sentence; NULL if the library knows none. UTF-8.
     */
    const char *hint;
} vmmfd_error_t;

/*
 Receives one line of the log, without a line break. `message` is valid during the call. `context` is the program's own.

 Any thread calls it, also threads of the library, and several at once. It must return soon, and must not call this library, throw or
 jump.
 */
typedef void (*vmmfd_log_hook_t)(enum vmmfd_level_t level,
                                 const char *message,
                                 void *context);

/*
 Frees an error. Does not block.
 */
void vmmfd_error_free(struct vmmfd_error_t *error);

/*
 Returns the library's version, such as `0.1.0`. The text is static. Never fails and does not block.
 */
VMMFD_MUST_USE
const char *vmmfd_library_version(void);

/*
 Passes the library's log to a function of the program: lines up to `level`, one of `vmmfd_level_t`. By default there is no log.

 `hook` NULL or level `VMMFD_LOG_OFF` stops the log. The library keeps `context` and does not use it. Another thread may still be in the
 previous hook when this returns, so its context must remain valid. Does not block. Any thread may call it; each call allocates some
 bytes for the rest of the process.

 Errors: `VMMFD_INVALID` for an unknown level, or if the program is in Rust and has its own `tracing` subscriber.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_log_set(uint32_t level,
                                    vmmfd_log_hook_t hook,
                                    void *context);

/* ---- Devices ---- */

/*
 Facts about a device. The texts are valid until the device is freed.
 */
typedef struct vmmfd_device_info_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     `cuda`, or `host` for ordinary memory of this machine.
     */
    const char *backend;
    /*
     The name, such as `NVIDIA H200`.
     */
    const char *name;
    /*
     The UUID with its prefix, such as `GPU-53e9a7d2-1f0c-5b7e-9c55-0123456789ab`. It identifies the device in every process.
     */
    const char *uuid;
    /*
     Why the backend is `host` although `auto` prefers CUDA; NULL otherwise.
     */
    const char *fallback;
    /*
     The ordinal in this process.
     */
    int32_t ordinal;
    /*
     Sizes of shareable memory are multiples of this, in bytes.
     */
    uint64_t granularity;
} vmmfd_device_info_t;

/*
 Counts the devices of a backend: `cuda`, `host`, or `auto` (also NULL), which is CUDA, or the host if there is no driver or no device.

 Blocks while the driver starts on first use, for up to about 100 ms.

 Errors: `VMMFD_INVALID` for another name; `VMMFD_UNSUPPORTED` if the machine has no usable driver or no device; `VMMFD_DRIVER`;
 `VMMFD_FORKED` if the parent process initialised the CUDA driver.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_device_count(const char *backend,
                                         uint32_t *count);

/*
 Opens a device of a backend: see `vmmfd_device_count`. `selector` is an ordinal of this process such as `0`, a UUID, or the first digits
 of a UUID such as `GPU-53e9`; NULL selects the first device.

 The caller frees `*device` with `vmmfd_device_free`; it is NULL after a failure. Blocks while the driver starts on first use, for up to
 about 100 ms, and creates the device's context only when memory needs it.

 Errors: as for `vmmfd_device_count`; `VMMFD_NOT_FOUND` if there is no such device; `VMMFD_INVALID` if several match.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_device_open(const char *backend,
                                        const char *selector,
                                        struct vmmfd_device_t **device);

/*
 Describes a device. Does not block.

 Errors: `VMMFD_INVALID`, `VMMFD_FORKED`, `VMMFD_DRIVER`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_device_info(const struct vmmfd_device_t *device,
                                        struct vmmfd_device_info_t *info);

/*
 Frees a device handle. Memory of the device remains valid. Does not block.
 */
void vmmfd_device_free(struct vmmfd_device_t *device);

/* ---- Memory ---- */

/*
 Where memory is.
 */
typedef enum vmmfd_placement_t {
    /*
     Device memory.
     */
    VMMFD_ON_DEVICE = 0,
    /*
     Host memory on the NUMA node closest to the device, which the CPU and the device both reach.
     */
    VMMFD_ON_HOST = 1,
} vmmfd_placement_t;

/*
 Whether network cards can reach memory (`gpuDirectRDMACapable`).
 */
typedef enum vmmfd_rdma_t {
    /*
     The flag is not requested.
     */
    VMMFD_RDMA_NEVER = 0,
    /*
     Where the device supports it.
     */
    VMMFD_RDMA_AUTO = 1,
    /*
     The allocation fails where the device does not support it.
     */
    VMMFD_RDMA_REQUIRED = 2,
} vmmfd_rdma_t;

/*
 Options of new memory, which start with `VMMFD_MEMORY_OPTIONS`.
 */
typedef struct vmmfd_memory_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     Splits the memory into allocations of this size in bytes, rounded up to the granularity. 0: one allocation.
     */
    uint64_t chunk;
    /*
     A value of `vmmfd_placement_t`.
     */
    uint32_t placement;
    /*
     A value of `vmmfd_rdma_t`.
     */
    uint32_t rdma;
} vmmfd_memory_options_t;

/*
 Facts about memory. The text is valid until the memory is freed.
 */
typedef struct vmmfd_memory_info_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The address on the device, the `CUdeviceptr`; on the host backend an address of this process.
     */
    uint64_t address;
    /*
     The size of the data in bytes.
     */
    uint64_t size;
    /*
     The size of the mapping in bytes: the size, rounded up.
     */
    uint64_t mapped_size;
    /*
     The number of allocations that `vmmfd_memory_export` exports; 0 for memory that another process created, and for buffers of streams.
     */
    uint64_t segments;
    /*
     The UUID of the device that the memory is mapped for, with its prefix.
     */
    const char *device;
    /*
     Whether this process may write to it. A kernel that writes to read-only memory destroys its CUDA context.
     */
    bool writable;
} vmmfd_memory_info_t;

/*
 Allocates shareable memory of `size` bytes on a device, and maps it for reading and writing. The contents are undefined.

 `options` NULL means the defaults. The caller frees `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Blocks while the
 driver allocates, and up to 100 ms while it creates the device's context.

 Errors: `VMMFD_INVALID` for a size of 0 and unknown options; `VMMFD_OUT_OF_MEMORY`; `VMMFD_UNSUPPORTED`; `VMMFD_SYSTEM` if this process
 has too few descriptors, one for each chunk; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls: `cuMemCreate`, `cuMemAddressReserve`,
 `cuMemMap`, `cuMemSetAccess`, `cuMemExportToShareableHandle`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_create(const struct vmmfd_device_t *device,
                                          uint64_t size,
                                          const struct vmmfd_memory_options_t *options,
                                          struct vmmfd_memory_t **memory);

/*
 Describes memory. Does not block, except while a lease is switched.

 Errors: `VMMFD_INVALID`, also for memory of a parked lease; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_info(const struct vmmfd_memory_t *memory,
                                        struct vmmfd_memory_info_t *info);

/*
 Copies `size` bytes of the caller into the memory, starting at `offset`. Blocks until the copy is complete, including earlier work on
 the default stream. Any threads may call it at once, and must agree who writes which bytes.

 Errors: `VMMFD_INVALID` if the range exceeds the memory or the memory is read-only; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls:
 `cuMemcpyHtoD`, `cuStreamSynchronize`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_copy_in(const struct vmmfd_memory_t *memory,
                                           uint64_t offset,
                                           const void *from,
                                           size_t size);

/*
 Copies `size` bytes out of the memory, starting at `offset`, into a buffer of the caller. Blocks until the copy is complete, including
 earlier work on the default stream. Any threads may call it at once.

 Errors: as for `vmmfd_memory_copy_in`. Driver call: `cuMemcpyDtoH`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_copy_out(const struct vmmfd_memory_t *memory,
                                            uint64_t offset,
                                            void *to,
                                            size_t size);

/*
 Waits until all work in the device's primary context has finished, which the CUDA runtime, PyTorch and others use. Call it after your
 kernels and before another process reads the memory. Blocks without limit.

 Errors: `VMMFD_DRIVER`, also for an earlier asynchronous failure; `VMMFD_INVALID`; `VMMFD_FORKED`. Driver call: `cuCtxSynchronize`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_synchronize(const struct vmmfd_memory_t *memory);

/*
 Duplicates the descriptor of one allocation, to send over the program's own socket (`SCM_RIGHTS`). `*size` is its size in
 bytes, which the receiver needs. `segment` counts from 0: see `segments` of `vmmfd_memory_info_t`.

 The caller closes `*fd`, which is close-on-exec; it is -1 after a failure. A holder of the descriptor can read and write the memory, and
 keeps it allocated. Does not block.

 Errors: `VMMFD_INVALID` for memory that another process created, a buffer of a stream, and a segment that does not exist;
 `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_export(const struct vmmfd_memory_t *memory,
                                          uint64_t segment,
                                          int *fd,
                                          uint64_t *size);

/*
 Shares `size` bytes at an address of this process that another library allocated with `cuMemCreate`, without a copy: PyTorch with
 expandable segments, JAX, or your own code. `*memory` is the allocations that contain them, and `*offset` the place of the first byte
 in it, both 0 or NULL after a failure.

 A receiver can read and write everything in these allocations: without `neighbours`, they must be full of the given bytes. The memory
 is read-only through its own addresses and outlives its owner; the contents do not. Keep the bytes allocated for as long as another
 process uses them. The caller frees `*memory` with `vmmfd_memory_free`. Blocks for driver calls, about 0.1 ms for each
 allocation.

 Errors: `VMMFD_UNSUPPORTED` for memory that can't be exported, with the reason, and always on the host backend; `VMMFD_INVALID` for a
 size of 0 and for neighbours; `VMMFD_SYSTEM` if this process has too few descriptors; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls:
 `cuPointerGetAttribute`, `cuMemRetainAllocationHandle`, `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`,
 `cuMemExportToShareableHandle`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_at(const struct vmmfd_device_t *device,
                                      uint64_t address,
                                      uint64_t size,
                                      bool neighbours,
                                      struct vmmfd_memory_t **memory,
                                      uint64_t *offset);

/*
 Imports `count` allocations that another process exported, and maps them side by side for a device. `sizes` are the exporter's, in
 bytes: a descriptor does not carry its size.

 The caller keeps its descriptors and may close them afterwards. `writable` asks for write access of this process. The caller frees
 `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Blocks for the driver's calls.

 Errors: `VMMFD_INVALID` for a descriptor that is not open, no descriptor, or a size that is not a multiple of the granularity;
 `VMMFD_DRIVER` or `VMMFD_UNSUPPORTED` for a wrong size or a descriptor of something else; `VMMFD_SYSTEM`; `VMMFD_FORKED`. Driver calls:
 `cuMemImportFromShareableHandle`, `cuMemAddressReserve`, `cuMemMap`, `cuMemSetAccess`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_memory_import(const struct vmmfd_device_t *device,
                                          const int *fds,
                                          const uint64_t *sizes,
                                          size_t count,
                                          bool writable,
                                          struct vmmfd_memory_t **memory);

/*
 Frees a handle of memory. The memory itself is released when no array, lease or DLPack tensor of this process uses it any more; other
 processes that have it open keep it. A loan is free again, and a sample is given back once all work in the device's primary context has
 finished, or behind its stream's work. May block for the driver's calls. Finish your own work on the memory first.
 */
void vmmfd_memory_free(struct vmmfd_memory_t *memory);

/* ---- Arrays ---- */

/*
 The layout of an array: of a new one as an argument, or of an array as a result, whose pointers are valid until the array is freed.
 */
typedef struct vmmfd_layout_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The element type: a name of NumPy or ml_dtypes such as `float32`, `uint8`, `bfloat16`, or a typestr such as `<f4`.
     */
    const char *dtype;
    /*
     The number of dimensions, at most 64.
     */
    size_t dimensions;
    /*
     The length of each dimension, in elements.
     */
    const uint64_t *shape;
    /*
     The distance of neighbours along each dimension, in bytes. As an argument, NULL means contiguous in C order.
     */
    const int64_t *strides;
    /*
     The position of the first element in the memory, in bytes.
     */
    uint64_t offset;
} vmmfd_layout_t;

/*
 Makes an array of memory. `layout` describes it, and its pointers are read during the call only.

 The caller frees `*array` with `vmmfd_array_free`; it is NULL after a failure. The array keeps the memory: the caller may free its
 handle. Does not block.

 Errors: `VMMFD_INVALID` for an unknown type, and for an array that is not inside the memory; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_array_create(const struct vmmfd_memory_t *memory,
                                         const struct vmmfd_layout_t *layout,
                                         struct vmmfd_array_t **array);

/*
 Describes an array. Does not block.

 Errors: `VMMFD_INVALID`, `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_array_info(const struct vmmfd_array_t *array,
                                       struct vmmfd_layout_t *layout);

/*
 Returns the memory of an array, to read and write its bytes. The array starts at `offset` of `vmmfd_array_info`.

 The caller frees `*memory` with `vmmfd_memory_free`; it is NULL after a failure. Does not block.

 Errors: `VMMFD_INVALID`, `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_array_memory(const struct vmmfd_array_t *array,
                                         struct vmmfd_memory_t **memory);

/*
 Frees a handle of an array. DLPack tensors of it remain valid. May block for the driver's calls if it was the last user of its memory.
 */
void vmmfd_array_free(struct vmmfd_array_t *array);

/*
 Exports an array as a DLPack tensor of version 1, without a copy. `dlpack.h` has the struct.

 The tensor's deleter frees it, on any thread, and may outlive the array. `*tensor` is NULL after a failure. A read-only array has the
 flag `DLPACK_FLAG_BITMASK_READ_ONLY`. While a tensor of a lease exists, the lease can't be switched or parked. Does not block, and waits
 for no stream: work of this process on the memory must be complete, or ordered before the reader's.

 Errors: `VMMFD_UNSUPPORTED` for big-endian and raw elements, and for strides that are not a multiple of the element; `VMMFD_INVALID`,
 also for memory of a parked lease; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_array_to_dlpack(const struct vmmfd_array_t *array,
                                            DLManagedTensorVersioned **tensor);

/*
 Copies a DLPack tensor of version 1 into new shareable memory of a device, as a contiguous array. `dlpack.h` has the struct.

 The library takes the tensor and calls its deleter, on success and on failure. CPU memory and CUDA memory can be copied; CUDA memory
 only to a device of CUDA. The caller frees `*array` with `vmmfd_array_free`; it is NULL after a failure. Blocks until the copy is
 complete; for CUDA memory also until all work in the primary context of the tensor's device is done.

 Errors: `VMMFD_INVALID` for a malformed tensor; `VMMFD_UNSUPPORTED` for other devices and other elements; the errors of
 `vmmfd_memory_create`. Driver calls: `cuMemcpyHtoD` or `cuMemcpyDtoD`, `cuStreamSynchronize`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_array_from_dlpack(const struct vmmfd_device_t *device,
                                              DLManagedTensorVersioned *tensor,
                                              struct vmmfd_array_t **array);

/* ---- Handoffs between two processes ---- */

/*
 Serve any number of consumers, until the call is stopped.
 */
#define VMMFD_ANY_NUMBER UINT64_MAX

/*
 Options of a handoff, which start with `VMMFD_HANDOFF_OPTIONS`.
 */
typedef struct vmmfd_handoff_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     A connected socket of type `SOCK_SEQPACKET`, such as one of a pair, used instead of a path. -1: none. The caller keeps it, and
     closes it after the call. One handoff for each socket: the call makes it non-blocking, and shuts it down at the end.
     */
    int socket;
    /*
     A descriptor, such as an eventfd(2), that stops the call within 50 ms after it becomes readable. -1: none. The caller keeps it.
     */
    int stop;
    /*
     The longest wait for a peer, and the longest silence of a peer, in milliseconds. 0: 30 s.
     */
    uint64_t timeout_ms;
    /*
     Serving at a path: the number of consumers. 0: one; `VMMFD_ANY_NUMBER`: any number, until the call is stopped.
     */
    uint64_t consumers;
    /*
     Users beside this process's user and root that the peer may run as.
     */
    const uint32_t *trust;
    /*
     The number of users in `trust`.
     */
    size_t trust_count;
    /*
     Taking: asks for write access.
     */
    bool writable;
} vmmfd_handoff_options_t;

/*
 Serves an array to other processes, which take it with `vmmfd_handoff_take`, `vmmfd.take` in Python or the program `consumer`.

 The memory must be of `vmmfd_memory_create` or `vmmfd_array_from_dlpack`. `path` is the socket's, NULL is this user's default; with
 `socket` of the options, it is NULL, and the one peer of that socket is served. `served`, which may be NULL, is the number of consumers
 that took the array; it is valid after a failure too. Consumers keep the memory allocated after this process frees it.

 Blocks until the number of consumers has been served, at most `timeout_ms` without a consumer; with `VMMFD_ANY_NUMBER` until it is
 stopped, which is then no error. First waits for all work in the device's primary context. Any thread may call it; to serve in the
 background, call it from a thread of your own.

 Errors: `VMMFD_TIMEOUT` if no consumer came; `VMMFD_INTERRUPTED` if it was stopped before; `VMMFD_INVALID` for other memory, and for a
 path or socket that can't be used; `VMMFD_DISCONNECTED` and other errors of the first consumer that failed; `VMMFD_DRIVER`;
 `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_handoff_serve(const char *path,
                                          const struct vmmfd_array_t *array,
                                          const struct vmmfd_handoff_options_t *options,
                                          uint64_t *served);

/*
 Takes the array that another process serves: with `vmmfd_handoff_serve`, `vmmfd.serve` in Python or the program `producer`. Memory
 without a type is an array of `uint8`.

 `device` is the device to map the memory for, if it can reach the memory; NULL means the memory's own device, of the backend `auto`.
 `path` and `socket` are as for `vmmfd_handoff_serve`. The memory is read-only unless `writable` of the options is set. The caller frees
 `*array` with `vmmfd_array_free`; it is NULL after a failure. The memory remains valid after the producer exits, unless the producer
 shares it by a pool or a legacy handle: it then lives as long as the producer.

 Blocks until the producer listens and it is this consumer's turn, at most `timeout_ms` without a sign of the producer. Any thread may
 call it.

 Errors: `VMMFD_NOT_FOUND` if no process listens in time; `VMMFD_DISCONNECTED`; `VMMFD_DENIED` for a user that is not
 trusted; `VMMFD_UNSUPPORTED` if this process has no device for the memory; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_DRIVER`;
 `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_handoff_take(const struct vmmfd_device_t *device,
                                         const char *path,
                                         const struct vmmfd_handoff_options_t *options,
                                         struct vmmfd_array_t **array);

/* ---- Order of GPU work ---- */

/*
 Whether GPU work of a peer is done.
 */
typedef enum vmmfd_completion_t {
    /*
     It is done, and all that it wrote is visible.
     */
    VMMFD_DONE = 0,
    /*
     It is not done yet.
     */
    VMMFD_PENDING = 1,
    /*
     The wait was released before it was known to be done: what was read behind the wait is undefined.
     */
    VMMFD_LOST = 2,
} vmmfd_completion_t;

/*
 How two processes order their GPU work.
 */
typedef struct vmmfd_order_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     Whether streams wait for streams. If not, a CPU waits for each buffer.
     */
    bool gpu;
    /*
     The reason for the order by CPUs, which ends with a null character, in UTF-8. A longer text is cut. Empty if streams wait.
     */
    char reason[255];
} vmmfd_order_t;

/*
 Creates a timeline whose value is 0, for streams of a device. Only this process records on it. Blocks for about a millisecond, for a
 test of the streams.

 The caller frees `*timeline` with `vmmfd_timeline_free`; it is NULL after a failure.

 Errors: `VMMFD_UNSUPPORTED` if the device's streams can't wait for host memory, as on the host backend; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
 `VMMFD_FORKED`. Driver calls: `cuMemHostRegister`, `cuStreamCreate`, `cuStreamBatchMemOp`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_create(const struct vmmfd_device_t *device,
                                            struct vmmfd_timeline_t **timeline);

/*
 Opens another process's timeline from a descriptor of `vmmfd_timeline_descriptor`, which the caller keeps and may close afterwards.
 With `device` NULL, no stream can use it, but this process can query it, wait on the CPU, and release.

 The caller frees `*timeline` with `vmmfd_timeline_free`; it is NULL after a failure.

 Errors: `VMMFD_SYSTEM` for a descriptor of something else; the errors of `vmmfd_timeline_create`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_open(const struct vmmfd_device_t *device,
                                          int fd,
                                          struct vmmfd_timeline_t **timeline);

/*
 Raises the value by 1 when all earlier work of a stream is done. `*value` is the new value. Does not wait for the work.

 `stream` is a `CUstream` or `cudaStream_t` of the timeline's device; NULL is the legacy default stream. It exists until the next record
 on another stream, or until the timeline is freed.

 Errors: `VMMFD_INVALID` if another process records, for a stream of another device, in a capture, and for the per-thread default stream;
 `VMMFD_DISCONNECTED` after a release; `VMMFD_DRIVER`; `VMMFD_FORKED`. Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_record(const struct vmmfd_timeline_t *timeline,
                                            void *stream,
                                            uint64_t *value);

/*
 Lets a stream wait until the value is reached, at most `timeout_ms` long. Does not block. After this time all waits for the timeline are
 released, in all processes, and it can't be used any more. `stream` is as for `vmmfd_timeline_record`, and exists during the call.

 Errors: the errors of `vmmfd_timeline_record`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_wait(const struct vmmfd_timeline_t *timeline,
                                          void *stream,
                                          uint64_t value,
                                          uint64_t timeout_ms);

/*
 Blocks until the value is reached, for at most `timeout_ms`. `stop` is a descriptor, such as an eventfd(2), that ends the wait within
 50 ms after it becomes readable; -1 is none.

 Errors: `VMMFD_TIMEOUT` after this time; `VMMFD_DISCONNECTED` after a release; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
 `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_wait_cpu(const struct vmmfd_timeline_t *timeline,
                                              uint64_t value,
                                              uint64_t timeout_ms,
                                              int stop);

/*
 Returns whether the value was reached. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_completion(const struct vmmfd_timeline_t *timeline,
                                                uint64_t value,
                                                enum vmmfd_completion_t *completion);

/*
 Returns the value now; after a release the largest number. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_value(const struct vmmfd_timeline_t *timeline,
                                           uint64_t *value);

/*
 Ends all waits for the timeline, in all processes. Values that were not reached are lost. Does not block, and makes no driver call.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_release(const struct vmmfd_timeline_t *timeline);

/*
 Releases the waits when a process ends, or closes its end of a connection. `peer` is the pidfd of the process, or a connected socket. The
 library keeps a duplicate. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_release_with(const struct vmmfd_timeline_t *timeline,
                                                  int peer);

/*
 Returns the descriptor of the timeline, to send to another process over the program's own socket (`SCM_RIGHTS`). A holder can wait and
 release.

 The timeline owns the descriptor: do not close it. `*fd` is -1 after a failure. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_timeline_descriptor(const struct vmmfd_timeline_t *timeline,
                                                int *fd);

/*
 Frees a timeline. Of a device, blocks while any stream of the device waits for a timeline: to end such waits, call
 `vmmfd_timeline_release` first.
 */
void vmmfd_timeline_free(struct vmmfd_timeline_t *timeline);

/* ---- Streams ---- */

/*
 The kind of a stream's event.
 */
typedef enum vmmfd_stream_event_kind_t {
    /*
     A kind that this version of the library does not know.
     */
    VMMFD_STREAM_UNKNOWN = 0,
    /*
     A subscriber has mapped the pool, and receives the next publication.
     */
    VMMFD_STREAM_JOINED = 1,
    /*
     A subscriber was freed.
     */
    VMMFD_STREAM_LEFT = 2,
    /*
     A subscriber's process has exited, closed the connection or broken the protocol. Its buffers return when its process exits.
     */
    VMMFD_STREAM_LOST = 3,
    /*
     A subscriber with `VMMFD_EVERY` gave no buffer back for `every_ms`. Its buffers return when it gives them back or its process exits.
     */
    VMMFD_STREAM_EVICTED = 4,
    /*
     A loan got no buffer in time: the error of the loan has the processes that have buffers.
     */
    VMMFD_STREAM_STARVED = 5,
} vmmfd_stream_event_kind_t;

/*
 The result of `vmmfd_subscriber_receive`.
 */
typedef enum vmmfd_received_t {
    /*
     No buffer arrived in time.
     */
    VMMFD_NOTHING = 0,
    /*
     A buffer.
     */
    VMMFD_SAMPLE = 1,
    /*
     The publisher has finished, and this subscriber has received its last buffer.
     */
    VMMFD_ENDED = 2,
    /*
     The publisher's process died, or freed the publisher without `vmmfd_publisher_finish`.
     */
    VMMFD_CRASHED = 3,
    /*
     The first publisher of a topic was joined.
     */
    VMMFD_JOINED = 4,
    /*
     A later publisher of a topic was joined: it numbers its publications anew, and its format may differ.
     */
    VMMFD_RESET = 5,
    /*
     The publisher of a topic can't be joined, or has ended this subscription. If it is full or does not answer, it is tried again
     without another report.
     */
    VMMFD_FAILED = 6,
} vmmfd_received_t;

/*
 What happens to buffers that a subscriber has no room for, because it has as many as it may hold.
 */
typedef enum vmmfd_policy_t {
    /*
     The newest waits at the publisher, and replaces an older one: a slow subscriber skips to the newest.
     */
    VMMFD_LATEST = 0,
    /*
     The newest wait at the publisher, at most `queue` of them.
     */
    VMMFD_QUEUE = 1,
    /*
     The publisher waits, so the subscriber skips nothing. Only if the publisher allows it.
     */
    VMMFD_EVERY = 2,
} vmmfd_policy_t;

/*
 Options of a publisher, which start with `VMMFD_PUBLISHER_OPTIONS`.
 */
typedef struct vmmfd_publisher_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     A descriptor, such as an eventfd(2), that stops the waits of all calls within 50 ms after it becomes readable. -1: none. The caller
     keeps it.
     */
    int stop;
    /*
     The place of the pool: a value of `vmmfd_placement_t`.
     */
    uint32_t placement;
    /*
     The permissions of topics, such as 0640: the users who may read follow them. 0: 0600.
     */
    uint16_t mode;
    /*
     The number of publications that a late subscriber can receive at once.
     */
    uint64_t history;
    /*
     The most buffers that are on loan at a time. 0: one.
     */
    uint64_t loans;
    /*
     How long the publisher waits for a subscriber with `VMMFD_EVERY` before it evicts the subscriber, in milliseconds. 0: such
     subscribers are refused.
     */
    uint64_t every_ms;
    /*
     The longest silence of a subscriber that joins, in milliseconds. 0: 30 s.
     */
    uint64_t timeout_ms;
    /*
     Users beside this process's user and root that subscribers may run as.
     */
    const uint32_t *trust;
    /*
     The number of users in `trust`.
     */
    size_t trust_count;
} vmmfd_publisher_options_t;

/*
 Describes the buffers of a stream: named arrays, and bytes of the program's own. As an argument, its pointers are read during the call
 only; in a sample, they are valid until the memory of the sample is freed.
 */
typedef struct vmmfd_format_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The number of arrays, at most 64.
     */
    size_t array_count;
    /*
     The names of the arrays.
     */
    const char *const *names;
    /*
     Their layouts, with offsets from the start of the buffer: `vmmfd_array_create` makes an array of the buffer's memory and a layout.
     `strides` of a layout is NULL if the array is contiguous in C order.
     */
    const struct vmmfd_layout_t *const *layouts;
    /*
     The program's own bytes.
     */
    const void *blob;
    /*
     The number of bytes in `blob`, at most 65,536.
     */
    size_t blob_size;
} vmmfd_format_t;

/*
 An event of a publisher.
 */
typedef struct vmmfd_stream_event_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The kind.
     */
    enum vmmfd_stream_event_kind_t kind;
    /*
     The subscriber's process; 0 for `VMMFD_STREAM_STARVED`.
     */
    int pid;
    /*
     The subscriber's number, which the publisher uses once; 0 for `VMMFD_STREAM_STARVED`.
     */
    uint64_t id;
} vmmfd_stream_event_t;

/*
 Options of a subscriber, which start with `VMMFD_SUBSCRIBER_OPTIONS`.
 */
typedef struct vmmfd_subscriber_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     A connected socket of type `SOCK_SEQPACKET`, used instead of a path. -1: none. The library keeps a duplicate; the caller closes its
     own after the call.
     */
    int socket;
    /*
     A descriptor, such as an eventfd(2), that stops the waits of all calls within 50 ms after it becomes readable. -1: none. The caller
     keeps it.
     */
    int stop;
    /*
     The longest wait for the publisher to listen, and its longest silence while this subscriber joins, in milliseconds. 0: 30 s.
     */
    uint64_t timeout_ms;
    /*
     A value of `vmmfd_policy_t`.
     */
    uint32_t policy;
    /*
     The most buffers that wait with `VMMFD_QUEUE`: 1 to 1,024. 0 with the other policies.
     */
    uint32_t queue;
    /*
     The most buffers that this subscriber has at a time: samples that exist, and buffers on their way to it. At most 64. 0: one.
     */
    uint32_t held;
    /*
     The most earlier publications to receive at once.
     */
    uint32_t history;
    /*
     Users beside this process's user and root that the publisher may run as.
     */
    const uint32_t *trust;
    /*
     The number of users in `trust`.
     */
    size_t trust_count;
    /*
     A broker that introduces the publishers of topics, used instead of a path. NULL: none.
     */
    const struct vmmfd_broker_t *broker;
    /*
     Whether to follow all topics whose names start with the given text. Only with a `broker`.
     */
    bool prefix;
} vmmfd_subscriber_options_t;

/*
 The result of a receive, with the buffer if there is one. The pointers are valid until `memory` is freed.
 */
typedef struct vmmfd_sample_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The result. Without `VMMFD_SAMPLE`, all later fields but `pid`, `topic`, `epoch` and `error` are 0 or NULL.
     */
    enum vmmfd_received_t result;
    /*
     The publisher's process. Of topics, only with `VMMFD_CRASHED`, else 0.
     */
    int pid;
    /*
     The buffer, mapped read-only. The caller frees it with `vmmfd_memory_free`, which gives the buffer back.
     */
    struct vmmfd_memory_t *memory;
    /*
     The address of the buffer on the device, the `CUdeviceptr`; on the host backend an address of this process.
     */
    uint64_t address;
    /*
     The size of the buffer in bytes.
     */
    uint64_t size;
    /*
     The number of the publication, counted from 1.
     */
    uint64_t number;
    /*
     The time of the publication, in nanoseconds of `CLOCK_MONOTONIC`, which all processes of the machine share.
     */
    uint64_t published_ns;
    /*
     The number of publications between the sample before and this one, which this subscriber did not get. 0 for the first.
     */
    uint64_t skipped;
    /*
     The publisher's own bytes.
     */
    const void *user;
    /*
     The number of bytes in `user`, at most 4,096.
     */
    size_t user_size;
    /*
     The description of the buffer, without arrays and blob until the publisher sets it.
     */
    const struct vmmfd_format_t *format;
    /*
     The reason for `VMMFD_FAILED`, else NULL. The caller frees it with `vmmfd_error_free`.
     */
    struct vmmfd_error_t *error;
    /*
     The publisher's run: another publisher of the topic has another epoch. 0 without topics.
     */
    uint64_t epoch;
    /*
     The topic's name, which ends with a null character. Empty without topics.
     */
    char topic[256];
} vmmfd_sample_t;

/*
 Allocates the pool of a publisher on a device: `room` buffers of `size` bytes each. With `size` 0 the sizes vary, and `room` is the size
 of the pool in bytes. Subscribers come by `vmmfd_publisher_listen` and `vmmfd_publisher_admit`.

 With a fixed size, a subscriber is refused if the pool has fewer buffers than the sum of: the buffers that each subscriber may hold, the
 history (or the longest queue less 1), the loans, and 1. So no subscriber without `VMMFD_EVERY` can make a loan wait. `options` NULL
 means the defaults. The caller frees `*publisher` with `vmmfd_publisher_free`; it is NULL after a failure. Blocks while the driver
 allocates. A thread of the library serves all publishers of the process; it blocks all signals.

 Errors: `VMMFD_INVALID` for a pool without room for a buffer and unknown options; the errors of `vmmfd_memory_create`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_create(const struct vmmfd_device_t *device,
                                             uint64_t size,
                                             uint64_t room,
                                             const struct vmmfd_publisher_options_t *options,
                                             struct vmmfd_publisher_t **publisher);

/*
 Accepts subscribers at a place from now on: without a `broker`, at a socket path. `place` NULL is this user's default path. Replaces an
 earlier path. With a `broker`, `place` is the name of a topic, at which the broker introduces subscribers until the publisher finishes or
 is freed; a publisher may have a path and several topics. Does not wait for subscribers.

 A topic outlives the handle `broker`, and a restart of the broker: the streams go on, and new subscribers wait for its successor. Blocks
 until the broker has answered.

 Errors: `VMMFD_INVALID` for a path or name that can't be used; `VMMFD_EXISTS` if the topic has another publisher; `VMMFD_SYSTEM`, also
 if another process listens at the path; `VMMFD_DISCONNECTED` and `VMMFD_INTERRUPTED`, of the broker; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_listen(const struct vmmfd_publisher_t *publisher,
                                             const struct vmmfd_broker_t *broker,
                                             const char *place);

/*
 Accepts the subscriber at the other end of a connected socket of type `SOCK_SEQPACKET`. Does not wait for it.

 The library keeps a duplicate of `socket`. The caller closes its own after the call, because the subscriber sees the end of a publisher
 only when all duplicates are closed.

 Errors: `VMMFD_INVALID` for another descriptor; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_admit(const struct vmmfd_publisher_t *publisher,
                                            int socket);

/*
 Describes the buffers that are published from now on. `format` is sent when it changes, not with each buffer. Does not block.

 Errors: `VMMFD_INVALID` for more than 64 arrays, a blob of more than 65,536 bytes, arrays that are not inside a buffer of the fixed
 size, and wrong layouts; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_set_format(const struct vmmfd_publisher_t *publisher,
                                                 const struct vmmfd_format_t *format);

/*
 Takes a free buffer, to fill and publish: memory with an address in `vmmfd_memory_info`, which contains the bytes of an earlier
 publication. `size` 0 is the fixed size of the publisher's buffers.

 The caller passes `*loan` to `vmmfd_loan_publish`, or frees it with `vmmfd_memory_free`, after which the buffer is free again; it is NULL
 after a failure. Blocks for at most `timeout_ms` while all loans are taken, while a subscriber with `VMMFD_EVERY` has no room, and, if
 the sizes vary, while the pool is full. With `timeout_ms` 0 it does not block, and `*loan` is NULL without an error if no buffer is free;
 the descriptor of the publisher is then readable after the next change.

 Errors: `VMMFD_TIMEOUT` after `timeout_ms`, with the processes that have the buffers; `VMMFD_INVALID` for a size of 0 if the sizes vary,
 and for a size that exceeds the fixed size or the pool; `VMMFD_INTERRUPTED`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_loan(const struct vmmfd_publisher_t *publisher,
                                           uint64_t size,
                                           uint64_t timeout_ms,
                                           struct vmmfd_memory_t **loan);

/*
 Publishes a loan with `user_size` bytes of the program's own, at most 4,096. Waits for no subscriber.

 On success the handle `loan` is freed; after a failure the caller frees it with `vmmfd_memory_free`. `number`, which may be NULL, is the
 number of the publication, counted from 1. Without `idle`, blocks until all work in the device's primary context has finished. With
 `idle` it does not block: the program has already waited for its own work on the buffer.

 Errors: `VMMFD_INVALID` for memory that is no loan, for too many bytes, while another call or a DLPack tensor uses the loan, and after
 `vmmfd_publisher_finish`; `VMMFD_DRIVER` if the GPU's work failed; `VMMFD_FORKED`. Driver call: `cuCtxSynchronize`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_loan_publish(struct vmmfd_memory_t *loan,
                                         const void *user,
                                         size_t user_size,
                                         bool idle,
                                         uint64_t *number);

/*
 Publishes a loan like `vmmfd_loan_publish`, behind the work that a stream has now. Waits neither for this work nor for subscribers: the
 streams of subscribers wait for it (`vmmfd_subscriber_receive_on`), or their CPUs. If streams can't order the work
 (`vmmfd_publisher_order`), the call waits for the stream. The first call takes about a millisecond longer.

 `stream` is a `CUstream` or `cudaStream_t` of the publisher's device, which exists during the call; NULL is the legacy default stream.

 Errors: `VMMFD_INVALID` for a stream of another device and in a capture; `VMMFD_UNSUPPORTED` on the host backend; the errors of
 `vmmfd_loan_publish`. Driver calls: `cuStreamIsCapturing`, `cuStreamBatchMemOp`; sometimes `cuMemHostRegister` or `cuStreamSynchronize`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_loan_publish_on(struct vmmfd_memory_t *loan,
                                            void *stream,
                                            const void *user,
                                            size_t user_size,
                                            uint64_t *number);

/*
 How publications on streams reach subscribers. Does not block. Before the first publication on a stream, it is the device's claim.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_order(const struct vmmfd_publisher_t *publisher,
                                            struct vmmfd_order_t *order);

/*
 Returns the next event of a publisher. `*found` is false if there is none. The publisher keeps the last 1,024 events. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_event(const struct vmmfd_publisher_t *publisher,
                                            struct vmmfd_stream_event_t *event,
                                            bool *found);

/*
 Returns a descriptor that is readable, in poll(2) and epoll(7), when an event waits or a buffer may be free. Then call
 `vmmfd_publisher_event` until it finds none, and `vmmfd_publisher_loan` with `timeout_ms` 0.

 The publisher owns the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_descriptor(const struct vmmfd_publisher_t *publisher,
                                                 int *fd);

/*
 Completes the stream: nothing more can be published, and each subscriber receives `VMMFD_ENDED` behind the buffers that wait for it.
 Blocks until all subscribers have received and given back everything, for at most `timeout_ms`, after which waiting buffers are lost.
 Afterwards the caller frees the publisher.

 Errors: `VMMFD_INTERRUPTED` and `VMMFD_SYSTEM`; a publisher that is then freed looks crashed. `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_publisher_finish(const struct vmmfd_publisher_t *publisher,
                                             uint64_t timeout_ms);

/*
 Frees a publisher and closes its connections. Without `vmmfd_publisher_finish` before, subscribers receive `VMMFD_CRASHED`. Samples of
 subscribers remain readable. Does not wait for subscribers.
 */
void vmmfd_publisher_free(struct vmmfd_publisher_t *publisher);

/*
 Subscribes to the publisher at a socket path, or at the other end of `socket` of the options, and maps its pool, read-only.

 With a `broker` of the options, `path` is the name of a topic, or with `prefix` the start of the names of several. The subscriber then
 receives from their publishers, now and later, and the other options apply to each of them. It outlives the handle `broker`, and waits
 for the broker's successor. The call does not wait for publishers: `vmmfd_subscriber_receive` reports them, also if they refuse.

 `device` is the device to map the pool for, if it can reach the pool; NULL means the pool's own device, of the backend `auto`. `path`
 NULL is this user's default; with a `socket` it is NULL. `options` NULL means the defaults: `VMMFD_LATEST`, one buffer at a time. The
 caller frees `*subscriber` with `vmmfd_subscriber_free`; it is NULL after a failure. Blocks until the publisher listens and the pool is
 mapped, at most `timeout_ms` without a sign of the publisher.

 Errors: `VMMFD_NOT_FOUND` if no process listens in time; `VMMFD_SYSTEM` if the publisher's pool has too few buffers for another
 subscriber, or the stream is complete; `VMMFD_DENIED` if the publisher does not allow `VMMFD_EVERY`, and for a user that is not trusted;
 `VMMFD_DISCONNECTED` if the publisher is gone; `VMMFD_UNSUPPORTED` if this process has no device for the pool; `VMMFD_INTERRUPTED`;
 `VMMFD_INVALID`; `VMMFD_DRIVER`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_subscriber_connect(const struct vmmfd_device_t *device,
                                               const char *path,
                                               const struct vmmfd_subscriber_options_t *options,
                                               struct vmmfd_subscriber_t **subscriber);

/*
 Waits for the next buffer, for at most `timeout_ms`; 0 is not to wait. Buffers arrive in the order of publication. `sample->result` is the
 kind of the result: a wait without a buffer, the end of the stream and the death of the publisher are no errors. Of topics, the results
 have `topic` and `epoch`, and receiving continues after each of them.

 The caller frees `sample->memory` with `vmmfd_memory_free`, from any thread, also after the subscriber or the publisher is gone. This
 waits until all work in the device's primary context has finished, and then gives the buffer back, unless an array or a DLPack tensor
 still uses it: then the last of them gives it back.

 Errors: `VMMFD_DISCONNECTED` if the publisher has evicted this subscriber or broke the protocol, after which calls return `VMMFD_INVALID`
 and samples remain readable; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_subscriber_receive(const struct vmmfd_subscriber_t *subscriber,
                                               uint64_t timeout_ms,
                                               struct vmmfd_sample_t *sample);

/*
 Receives like `vmmfd_subscriber_receive`, for work on a stream: does not wait until the publisher's GPU has written the buffer. The stream
 waits instead, at most `timeout_ms` long. If the publisher's process ends or is late, the stream continues, and `vmmfd_sample_completion`
 returns `VMMFD_LOST`. If streams can't order the work (`vmmfd_subscriber_order`), the call waits until the buffer is written. The first
 call takes about a millisecond longer.

 `stream` is a `CUstream` or `cudaStream_t` of the device that has the pool mapped, and exists until the sample is freed; NULL is the
 legacy default stream. Use the sample's address on this stream only. `vmmfd_memory_free` gives the buffer back behind the work that the
 stream then has, and does not wait for it; `vmmfd_memory_copy_out` waits for the stream.

 Errors: `VMMFD_INVALID` for a stream of another device, in a capture, for the per-thread default stream, for `timeout_ms` 0, and for a
 subscriber of topics; `VMMFD_DISCONNECTED` also once the publisher was late; the errors of `vmmfd_subscriber_receive`. Driver calls:
 `cuStreamIsCapturing`, `cuStreamBatchMemOp`; at the first call `cuMemHostRegister`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_subscriber_receive_on(const struct vmmfd_subscriber_t *subscriber,
                                                  void *stream,
                                                  uint64_t timeout_ms,
                                                  struct vmmfd_sample_t *sample);

/*
 Whether the publisher's GPU has written a sample. `VMMFD_PENDING` is possible only with `vmmfd_subscriber_receive_on`; after `VMMFD_LOST`,
 discard what was read. Does not block.

 Errors: `VMMFD_INVALID`, also for memory that is no sample; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_sample_completion(const struct vmmfd_memory_t *memory,
                                              enum vmmfd_completion_t *completion);

/*
 Whether the streams of `vmmfd_subscriber_receive_on` wait for the publisher's, or why not. The first call tests it, and blocks for about a
 millisecond.

 Errors: `VMMFD_INVALID`, also for a subscriber of topics; `VMMFD_FORKED`. Driver calls: `cuMemHostRegister`, `cuStreamCreate`,
 `cuStreamBatchMemOp`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_subscriber_order(const struct vmmfd_subscriber_t *subscriber,
                                             struct vmmfd_order_t *order);

/*
 Returns a descriptor that is readable, in poll(2) and epoll(7), when something has arrived or the publisher is gone. Then call
 `vmmfd_subscriber_receive` with `timeout_ms` 0 until it returns `VMMFD_NOTHING`. At the end of the stream it remains readable; not with
 topics.

 The subscriber and its samples own the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_subscriber_descriptor(const struct vmmfd_subscriber_t *subscriber,
                                                  int *fd);

/*
 Frees a subscriber, which leaves the stream. Its samples remain valid, and are given back when they are freed. A call of another thread
 finishes first: `stop` of the options ends its wait. Does not block.
 */
void vmmfd_subscriber_free(struct vmmfd_subscriber_t *subscriber);

/* ---- Brokers ---- */

/*
 When a put succeeds.
 */
typedef enum vmmfd_condition_t {
    /*
     If the name does not exist.
     */
    VMMFD_PUT_NEW = 0,
    /*
     Always: an existing object gets a new version.
     */
    VMMFD_PUT_ANY = 1,
    /*
     If `version` of the options is the current version.
     */
    VMMFD_PUT_VERSION = 2,
} vmmfd_condition_t;

/*
 When the broker deletes a name.
 */
typedef enum vmmfd_lifetime_t {
    /*
     For a new name, when it is deleted explicitly; an existing name keeps its lifetime.
     */
    VMMFD_UNTIL_DELETED = 0,
    /*
     When the connection that put it closes.
     */
    VMMFD_WITH_MAKER = 1,
    /*
     When the connection that put it has closed and no lease is held.
     */
    VMMFD_WHILE_LEASED = 2,
    /*
     `idle_ms` after its last lease, or after the put.
     */
    VMMFD_UNTIL_IDLE = 3,
} vmmfd_lifetime_t;

/*
 Options of a connection to a broker, which start with `VMMFD_BROKER_OPTIONS`.
 */
typedef struct vmmfd_broker_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     A descriptor, such as an eventfd(2), that stops the waits of all requests within 50 ms after it becomes readable. -1: none. The
     caller keeps it.
     */
    int stop;
    /*
     The longest wait for each answer of the broker, and for a broker after a restart, in milliseconds. 0: 30 s.
     */
    uint64_t timeout_ms;
    /*
     The longest wait of `vmmfd_broker_connect` for a broker to listen, in milliseconds. 0: 1 s, or `timeout_ms` if that is shorter.
     */
    uint64_t wait_ms;
    /*
     Users beside this process's user and root that the broker may run as.
     */
    const uint32_t *trust;
    /*
     The number of users in `trust`.
     */
    size_t trust_count;
} vmmfd_broker_options_t;

/*
 An array to put, with its name in the object.
 */
typedef struct vmmfd_named_array_t {
    /*
     The part of the object; NULL: `all`.
     */
    const char *part;
    /*
     The name, unique in the part.
     */
    const char *name;
    /*
     The array, in memory that this process created.
     */
    const struct vmmfd_array_t *array;
} vmmfd_named_array_t;

/*
 Options of a put, which start with `VMMFD_PUT_OPTIONS`.
 */
typedef struct vmmfd_put_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     A value of `vmmfd_condition_t`.
     */
    uint32_t condition;
    /*
     A value of `vmmfd_lifetime_t`.
     */
    uint32_t lifetime;
    /*
     The version to replace, with `VMMFD_PUT_VERSION`.
     */
    uint64_t version;
    /*
     The time in milliseconds, with `VMMFD_UNTIL_IDLE`.
     */
    uint64_t idle_ms;
    /*
     The permissions of a new name, like a file's, at most 0666. 0: 0600. `r` allows get and list, `w` allows replacement.
     */
    uint16_t mode;
    /*
     How many earlier versions the broker keeps without a lease.
     */
    uint32_t keep;
    /*
     Metadata: a JSON object of at most 1 MiB; NULL for none.
     */
    const char *metadata;
    /*
     A digest of the bytes of an object with one part, in any format that the readers know; NULL for none.
     */
    const char *digest;
} vmmfd_put_options_t;

/*
 Options of a get, which start with `VMMFD_GET_OPTIONS`.
 */
typedef struct vmmfd_get_options_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     How long to wait for the object, in milliseconds. 0: not at all.
     */
    uint64_t wait_ms;
    /*
     The version. 0: the current one.
     */
    uint64_t version;
    /*
     Only a version that is newer than this. 0: any.
     */
    uint64_t newer_than;
    /*
     The names of the parts to get; NULL for all.
     */
    const char *const *parts;
    /*
     The number of names in `parts`.
     */
    size_t part_count;
    /*
     Metadata fields that must have these values: a JSON object; NULL for none.
     */
    const char *expect;
    /*
     The user that must own the name, if `expect_owner` is set.
     */
    uint32_t owner;
    /*
     Whether the name must belong to `owner`. Any user may put a name that does not exist.
     */
    bool expect_owner;
} vmmfd_get_options_t;

/*
 An object of the broker, at one version.
 */
typedef struct vmmfd_object_t {
    /*
     The name.
     */
    const char *name;
    /*
     The version's UUID.
     */
    const char *id;
    /*
     The memory's backend: `cuda` or `host`.
     */
    const char *backend;
    /*
     The creator's metadata, a JSON object; NULL in a list.
     */
    const char *metadata;
    /*
     The version's number, counted from 1.
     */
    uint64_t version;
    /*
     The size of the memory in bytes.
     */
    uint64_t size;
    /*
     The number of parts.
     */
    uint64_t parts;
    /*
     The number of arrays.
     */
    uint64_t arrays;
    /*
     The number of leases of all versions.
     */
    uint64_t leases;
    /*
     The time of publication, in milliseconds since 1970.
     */
    uint64_t created_ms;
    /*
     The user that owns the name.
     */
    uint32_t owner;
    /*
     The permissions of the name.
     */
    uint16_t mode;
} vmmfd_object_t;

/*
 Objects. The caller frees it with `vmmfd_listing_free`, which also frees the texts.
 */
typedef struct vmmfd_listing_t {
    /*
     The number of objects.
     */
    size_t count;
    /*
     The objects.
     */
    const struct vmmfd_object_t *const *objects;
} vmmfd_listing_t;

/*
 A lease of a recalled version.
 */
typedef struct vmmfd_holder_t {
    /*
     The process's command; NULL if the broker can't read it.
     */
    const char *command;
    /*
     The version's number.
     */
    uint64_t version;
    /*
     The size of the leased memory in bytes, as its creator claimed.
     */
    uint64_t size;
    /*
     The process, in the broker's PID namespace; 0 if it has no number there.
     */
    int pid;
    /*
     The process's user.
     */
    uint32_t uid;
    /*
     Whether the lease is released, or its process exited or disconnected. The end of the wait is no acknowledgement.
     */
    bool acknowledged;
} vmmfd_holder_t;

/*
 The result of a recall. The caller frees it with `vmmfd_recall_free`, which also frees the texts.
 */
typedef struct vmmfd_recall_t {
    /*
     The number of holders.
     */
    size_t holder_count;
    /*
     The leases of the versions at the time of the request and since then.
     */
    const struct vmmfd_holder_t *const *holders;
    /*
     Whether the broker holds none of the versions any more. Their memory is free, except where a process has it mapped without a lease.
     */
    bool free;
    /*
     Whether a name keeps one of the versions without a lease.
     */
    bool kept;
} vmmfd_recall_t;

/*
 Connects to a broker. `path` is the socket's; NULL is `VMMFD_BROKER_SOCKET` of the environment, else this user's broker, else the
 system's.

 The caller frees `*broker` with `vmmfd_broker_free`; it is NULL after a failure. If the broker restarts, the next request and a thread
 of the library connect again, and leases continue. The thread sleeps and blocks all signals. Blocks until a broker listens, for at most
 `wait_ms`, and answers, for at most `timeout_ms`.

 Errors: `VMMFD_NOT_FOUND` if no broker listens in time; `VMMFD_DENIED`; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`;
 `VMMFD_SYSTEM`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_connect(const char *path,
                                           const struct vmmfd_broker_options_t *options,
                                           struct vmmfd_broker_t **broker);

/*
 Publishes arrays under a name. The broker then holds the memory: this process may free it, or exit.

 The arrays are in memory of `vmmfd_memory_create` or `vmmfd_array_from_dlpack`, on one device for each part; several may share memory.
 `options` NULL means the defaults. `version`, which may be NULL, is the number of the new version. Readers map the memory read-only;
 later writes of this process are visible to them. Blocks until all work in the device's primary context is done and the broker has
 answered, for at most the connection's timeout.

 Errors: `VMMFD_EXISTS`; `VMMFD_DIFFERS` if the current version is another one; `VMMFD_DENIED`; `VMMFD_INVALID`; `VMMFD_DISCONNECTED`;
 `VMMFD_INTERRUPTED`; `VMMFD_DRIVER`; `VMMFD_SYSTEM`, also for a full broker and a quota; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_put(const struct vmmfd_broker_t *broker,
                                       const char *name,
                                       const struct vmmfd_named_array_t *arrays,
                                       size_t count,
                                       const struct vmmfd_put_options_t *options,
                                       uint64_t *version);

/*
 Leases an object, and maps its memory read-only.

 `device` is the device to map the memory for; NULL means the device that owns it, of the object's backend. `options` NULL means the
 current version, without a wait. The broker counts this process among the readers until the lease is freed. The caller frees `*lease`
 with `vmmfd_lease_free`; it is NULL after a failure. Blocks for `wait_ms`, for the broker's answer within the connection's timeout, and
 for the driver's calls; `vmmfd_broker_interrupt` interrupts the wait.

 Errors: `VMMFD_NOT_FOUND`; `VMMFD_TIMEOUT` if the object did not appear in time; `VMMFD_DIFFERS` if it is not as expected;
 `VMMFD_DENIED`; `VMMFD_UNSUPPORTED` if this process has no device for it; `VMMFD_INTERRUPTED`; `VMMFD_DISCONNECTED`; `VMMFD_INVALID`;
 `VMMFD_DRIVER`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_get(const struct vmmfd_broker_t *broker,
                                       const struct vmmfd_device_t *device,
                                       const char *name,
                                       const struct vmmfd_get_options_t *options,
                                       struct vmmfd_lease_t **lease);

/*
 Lists the objects whose names start with `prefix` and that this user may read, sorted by name. NULL is every name.

 The caller frees `*listing` with `vmmfd_listing_free`; it is NULL after a failure. Blocks until the broker answers, for at most the
 connection's timeout.

 Errors: `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_list(const struct vmmfd_broker_t *broker,
                                        const char *prefix,
                                        struct vmmfd_listing_t **listing);

/*
 Describes an object, as a listing of one: its current version, or `version` if it is not 0. Unlike in a list, the object has its
 metadata.

 The caller frees `*listing` with `vmmfd_listing_free`; it is NULL after a failure. Blocks until the broker answers, for at most the
 connection's timeout.

 Errors: `VMMFD_NOT_FOUND`; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_stat(const struct vmmfd_broker_t *broker,
                                        const char *name,
                                        uint64_t version,
                                        struct vmmfd_listing_t **listing);

/*
 Deletes a name. Readers keep their leases, and the broker keeps the memory until the last lease is released. Blocks until the broker
 answers, for at most the connection's timeout.

 Errors: `VMMFD_NOT_FOUND`; `VMMFD_DENIED` if another user owns the name; `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`;
 `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_delete(const struct vmmfd_broker_t *broker,
                                          const char *name);

/*
 Starts to watch the events of names that start with `prefix` and that this user may read; NULL is every name. The events start now.

 The watch has its own connection and thread. The caller frees `*watch` with `vmmfd_watch_free`; it is NULL after a failure. Blocks until
 the broker answers, for at most the connection's timeout.

 Errors: `VMMFD_DISCONNECTED`; `VMMFD_DENIED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_watch(const struct vmmfd_broker_t *broker,
                                         const char *prefix,
                                         struct vmmfd_watch_t **watch);

/*
 Ends the waits of other threads: a get on this connection, and each `vmmfd_watch_next` of its watches, which then fail with
 `VMMFD_INTERRUPTED`. Does nothing if none waits. Blocks only while the socket is full.

 Errors: `VMMFD_DISCONNECTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_interrupt(const struct vmmfd_broker_t *broker);

/*
 Frees a connection. It closes when its last lease is freed; names with the lifetime `VMMFD_WITH_MAKER` are then deleted. Does not block.
 */
void vmmfd_broker_free(struct vmmfd_broker_t *broker);

/*
 Frees a listing. Does not block.
 */
void vmmfd_listing_free(struct vmmfd_listing_t *listing);

/*
 Asks the processes that hold a version to release it, and waits until they have released it. No process can be forced: end a process that
 does not acknowledge.

 `version` is the version; 0 is the current one, and of a deleted name all versions that are still held. With `earlier`, and `version` 0,
 all versions are recalled but the current one. The holders see it by `vmmfd_lease_recalled` and by handlers of the other languages. The
 caller frees `*recall` with `vmmfd_recall_free`; it is NULL after a failure. Blocks for at most `wait_ms`, where 0 does not wait for the
 holders, and for the broker's answers, each for at most the connection's timeout.

 Errors: `VMMFD_NOT_FOUND` if there is no such object or version; `VMMFD_DENIED` if this user may not delete the name;
 `VMMFD_DISCONNECTED`; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_broker_recall(const struct vmmfd_broker_t *broker,
                                          const char *name,
                                          uint64_t version,
                                          bool earlier,
                                          uint64_t wait_ms,
                                          struct vmmfd_recall_t **recall);

/*
 Frees the result of a recall. Does not block.
 */
void vmmfd_recall_free(struct vmmfd_recall_t *recall);

/* ---- Leases ---- */

/*
 A part of a leased object.
 */
typedef struct vmmfd_part_t {
    /*
     The part's name.
     */
    const char *name;
    /*
     The digest of the bytes, in the creator's format; NULL if it gave none.
     */
    const char *digest;
    /*
     The size of the part's memory in bytes.
     */
    uint64_t size;
    /*
     The number of arrays.
     */
    size_t array_count;
    /*
     The names of the arrays.
     */
    const char *const *arrays;
} vmmfd_part_t;

/*
 Facts about a lease, at the time of the call. The caller frees it with `vmmfd_lease_info_free`, which also frees the texts.
 */
typedef struct vmmfd_lease_info_t {
    /*
     The object's name.
     */
    const char *name;
    /*
     The version's UUID.
     */
    const char *id;
    /*
     The creator's metadata: a JSON object, empty if it gave none.
     */
    const char *metadata;
    /*
     The number of parts.
     */
    size_t part_count;
    /*
     The parts that were requested.
     */
    const struct vmmfd_part_t *const *parts;
    /*
     The version's number, counted from 1.
     */
    uint64_t version;
    /*
     The time of publication, in milliseconds since 1970.
     */
    uint64_t created_ms;
    /*
     The user that owns the name.
     */
    uint32_t owner;
    /*
     Whether the broker counts this process among the readers, as far as this process knows.
     */
    bool held;
    /*
     Whether nothing is mapped: see `vmmfd_lease_park`.
     */
    bool parked;
} vmmfd_lease_info_t;

/*
 Describes a lease.

 The caller frees `*info` with `vmmfd_lease_info_free`; it is NULL after a failure. Does not block, except while the lease is switched.

 Errors: `VMMFD_INVALID`; `VMMFD_DISCONNECTED` if the metadata is not a JSON object; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_info(const struct vmmfd_lease_t *lease,
                                       struct vmmfd_lease_info_t **info);

/*
 Frees facts about a lease. Does not block.
 */
void vmmfd_lease_info_free(struct vmmfd_lease_info_t *info);

/*
 Returns whether the owner of the object has asked its readers for the memory of the lease's version: see `vmmfd_broker_recall`. Then free
 the lease with all its arrays, switch it to another version and free the old one, or park it without `keep`.

 `*recalled` is false after a failure, and for a parked lease that is not kept. The first call for a connection opens a second connection,
 which receives only recalls, and blocks for at most the connection's timeout. Later calls do not block, except while the lease is switched.

 Errors: `VMMFD_DISCONNECTED`; `VMMFD_NOT_FOUND` if no broker listens; `VMMFD_INTERRUPTED`; `VMMFD_INVALID`; `VMMFD_SYSTEM`;
 `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_recalled(const struct vmmfd_lease_t *lease,
                                           bool *recalled);

/*
 Returns an array of a lease by name. After a switch, the same array shows the new version.

 `part` is the name of its part; NULL means the only part that has an array of this name. The caller frees `*array` with
 `vmmfd_array_free`; it is NULL after a failure. The array keeps the lease: the lease is released when it and all its arrays are freed.
 Does not block, except while the lease is switched.

 Errors: `VMMFD_NOT_FOUND`; `VMMFD_INVALID` if `part` is NULL and several parts have the array, and for a parked lease; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_array(const struct vmmfd_lease_t *lease,
                                        const char *part,
                                        const char *name,
                                        struct vmmfd_array_t **array);

/*
 Leases another version of the object and imports it, ready to take the addresses of this lease. The old version remains in use, so the
 device holds both.

 `options` select the version, for example `newer_than`; NULL is the current one. Its arrays must have the same names, layouts and
 offsets; it may have more. The caller frees `*prepared` with `vmmfd_prepared_free`; it is NULL after a failure. Blocks as
 `vmmfd_broker_get`.

 Errors: as for `vmmfd_broker_get`; `VMMFD_DIFFERS` with the differences if the version does not fit.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_prepare(const struct vmmfd_lease_t *lease,
                                          const struct vmmfd_get_options_t *options,
                                          struct vmmfd_prepared_t **prepared);

/*
 Maps a prepared version at the addresses of the lease. Addresses, arrays and captured CUDA graphs remain valid and show the new version.
 `prepared` then holds the old version: switch back to it, or free it.

 Nothing may use the memory by address during the call: on CUDA, a kernel that does destroys the context, and on the host backend it sees
 old or new bytes. Copies of this library wait. Blocks without limit until all work in the device's primary context is done, then for the
 driver's calls.

 Errors: `VMMFD_INVALID` if a DLPack tensor of the lease exists, the lease is parked, or the version was prepared for another lease;
 `VMMFD_DRIVER`, and then the old version is mapped, or the lease is parked. After an error `prepared` is used up: free it.
 `VMMFD_FORKED`. Driver calls: `cuCtxSynchronize`, `cuMemUnmap`, `cuMemMap`, `cuMemSetAccess`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_switch(const struct vmmfd_lease_t *lease,
                                         const struct vmmfd_prepared_t *prepared);

/*
 Unmaps the memory of a lease and keeps its addresses reserved. With `keep`, the broker still counts this process among the readers, and
 keeps the version; otherwise the lease is released, and the device memory is free for others.

 Nothing may use the memory by address from now on. Blocks as `vmmfd_lease_switch`.

 Errors: as for `vmmfd_lease_switch`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_park(const struct vmmfd_lease_t *lease,
                                       bool keep);

/*
 Leases a version of the object and maps it at the addresses of a parked lease: `options` as for `vmmfd_lease_prepare`.

 Blocks as `vmmfd_broker_get`.

 Errors: `VMMFD_INVALID` if the lease is not parked; as for `vmmfd_lease_prepare`. The lease remains parked then.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_lease_unpark(const struct vmmfd_lease_t *lease,
                                         const struct vmmfd_get_options_t *options);

/*
 Frees a lease. It is released, and its memory is unmapped, when all its arrays, memory and tensors are freed too. May block for the
 driver's calls.
 */
void vmmfd_lease_free(struct vmmfd_lease_t *lease);

/*
 Frees a prepared version, and releases its lease. May block for the driver's calls.
 */
void vmmfd_prepared_free(struct vmmfd_prepared_t *prepared);

/* ---- Watches ---- */

/*
 The kind of an event.
 */
typedef enum vmmfd_event_kind_t {
    /*
     A kind that this version of the library does not know.
     */
    VMMFD_EVENT_UNKNOWN = 0,
    /*
     The first version of a name was published.
     */
    VMMFD_EVENT_PUBLISHED = 1,
    /*
     The next version of a name was published.
     */
    VMMFD_EVENT_REPLACED = 2,
    /*
     The name was deleted.
     */
    VMMFD_EVENT_DELETED = 3,
    /*
     A reader reported that the version differs from its description.
     */
    VMMFD_EVENT_REPORTED = 4,
    /*
     A lease was granted.
     */
    VMMFD_EVENT_LEASED = 5,
    /*
     A lease was released.
     */
    VMMFD_EVENT_ENDED = 6,
    /*
     Events are missing: the watch fell too far behind, or the broker lost its state. List the names to catch up.
     */
    VMMFD_EVENT_LOST = 7,
    /*
     The readers of the version were asked to release it.
     */
    VMMFD_EVENT_RECALLED = 8,
} vmmfd_event_kind_t;

/*
 An event. The texts are valid until the next call of `vmmfd_watch_next` with the watch, or until it is freed.
 */
typedef struct vmmfd_event_t {
    /*
     The size of this struct: `sizeof` it.
     */
    size_t struct_size;
    /*
     The kind. The other fields of `VMMFD_EVENT_LOST` are 0 or NULL.
     */
    enum vmmfd_event_kind_t kind;
    /*
     The object's name.
     */
    const char *name;
    /*
     The version's UUID.
     */
    const char *id;
    /*
     The sentence of `VMMFD_EVENT_REPORTED`; NULL otherwise.
     */
    const char *message;
    /*
     The version's number.
     */
    uint64_t version;
    /*
     The event's number in the broker's log.
     */
    uint64_t sequence;
    /*
     The time, in milliseconds since 1970.
     */
    uint64_t at_ms;
    /*
     The user of the process that caused it.
     */
    uint32_t uid;
    /*
     The process that caused it, or 0.
     */
    int32_t pid;
} vmmfd_event_t;

/*
 Returns a descriptor that is readable, in poll(2) and epoll(7), while events wait. Then call `vmmfd_watch_next` until it finds none.

 The watch owns the descriptor: do not close, read or write it. `*fd` is -1 after a failure. Does not block.

 Errors: `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_watch_descriptor(const struct vmmfd_watch_t *watch,
                                             int *fd);

/*
 Returns the next event. `*found` is false if none arrived in time; the event is then unknown. Blocks for at most `timeout_ms`; 0 is not
 to wait. One thread at a time may call it.

 Errors: `VMMFD_INTERRUPTED` if another thread frees the watch or calls `vmmfd_broker_interrupt`, or `stop` of the connection is
 readable. `VMMFD_DISCONNECTED` and others if the broker is gone or does not answer: the watch then tries again each second, continues
 at its place, and the call may be repeated. `VMMFD_INVALID`; `VMMFD_FORKED`.
 */
VMMFD_MUST_USE
struct vmmfd_error_t *vmmfd_watch_next(const struct vmmfd_watch_t *watch,
                                       uint64_t timeout_ms,
                                       struct vmmfd_event_t *event,
                                       bool *found);

/*
 Frees a watch, ends the wait of another thread for its next event, and stops its thread. Blocks until the thread has exited, usually for
 less than a millisecond.
 */
void vmmfd_watch_free(struct vmmfd_watch_t *watch);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VMMFD_H */
