/* What the tests of the C library share. */
#ifndef PARTS_H
#define PARTS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "vmmfd.h"

/* Ends the test unless a condition holds. */
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* Ends the test if a call failed. */
#define CHECK(call) check((call), __FILE__, __LINE__)

/* Ends the test unless a call fails with a code. */
#define FAILS(expected, call) fails((expected), (call), __FILE__, __LINE__)

static inline void check(vmmfd_error_t *error, const char *file, int line) {
    if (error != NULL) {
        fprintf(stderr, "%s:%d: code %d, driver %u: %s\n", file, line, (int)error->code, error->driver_code, error->message);
        vmmfd_error_free(error);
        exit(1);
    }
}

static inline void fails(vmmfd_code_t expected, vmmfd_error_t *error, const char *file, int line) {
    if (error == NULL || error->code != expected || strlen(error->message) < 10) {
        const char *got = error == NULL ? "success" : error->message;
        fprintf(stderr, "%s:%d: code %d instead of %d: %s\n", file, line, error ? (int)error->code : 0, (int)expected, got);
        exit(1);
    }
    vmmfd_error_free(error);
}

/* Makes memory of `count` 32-bit numbers from `first` on, and an array of it. */
static inline vmmfd_array_t *numbers(const vmmfd_device_t *device, uint64_t count, uint32_t first) {
    uint32_t *values = malloc(count * sizeof *values);
    for (uint64_t i = 0; i < count; i++)
        values[i] = first + (uint32_t)i;
    vmmfd_memory_t *memory;
    vmmfd_array_t *array;
    CHECK(vmmfd_memory_create(device, count * sizeof *values, NULL, &memory));
    CHECK(vmmfd_memory_copy_in(memory, 0, values, count * sizeof *values));
    vmmfd_layout_t layout = {.struct_size = sizeof layout, .dtype = "uint32", .dimensions = 1, .shape = &count};
    CHECK(vmmfd_array_create(memory, &layout, &array));
    vmmfd_memory_free(memory);
    free(values);
    return array;
}

/* Reads one number of an array of 32-bit numbers. */
static inline uint32_t number(const vmmfd_array_t *array, uint64_t index) {
    vmmfd_layout_t layout = {.struct_size = sizeof layout};
    vmmfd_memory_t *memory;
    uint32_t value = 0;
    CHECK(vmmfd_array_info(array, &layout));
    EXPECT(strcmp(layout.dtype, "uint32") == 0 && layout.dimensions == 1 && index < layout.shape[0]);
    CHECK(vmmfd_array_memory(array, &memory));
    CHECK(vmmfd_memory_copy_out(memory, layout.offset + index * sizeof value, &value, sizeof value));
    vmmfd_memory_free(memory);
    return value;
}

/* The tests of every_broker.c. */
void test_broker(const vmmfd_device_t *device, const char *path);

/* The tests of every_stream.c; `program` is this program's path, and `broker` a broker's. */
void test_stream(const vmmfd_device_t *device, const char *backend, const char *program, const char *broker);

/* The tests of every_order.c. */
void test_order(const vmmfd_device_t *device, bool has_streams);

/* Publishes or subscribes for the tests in another process. */
void be_stream_peer(const char *backend, const char *role, const char *path);

/* Ends the broker, and then uses the connection to it. */
void test_gone(const char *path, pid_t broker);

#endif
