/* Serves an array of 1,024 floats to one process, or takes it: handoff serve|take PATH [cuda|host]. Build:
 *   cc -std=c11 -Wall -Wextra -pedantic handoff.c -o handoff $(pkg-config --cflags --libs vmmfd) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmmfd.h>

#define COUNT 1024

/* Ends the program with the sentence of an error. */
static void check(vmmfd_error_t *error) {
    if (error == NULL)
        return;
    fprintf(stderr, "handoff: %s%s%s\n", error->message, error->hint ? ": " : "", error->hint ? error->hint : "");
    vmmfd_error_free(error);
    exit(1);
}

static void serve(const vmmfd_device_t *device, const char *path) {
    float values[COUNT];
    for (int i = 0; i < COUNT; i++)
        values[i] = 0.5f * (float)i;
    vmmfd_memory_t *memory;
    check(vmmfd_memory_create(device, sizeof values, NULL, &memory));
    check(vmmfd_memory_copy_in(memory, 0, values, sizeof values));
    const uint64_t shape[1] = {COUNT};
    vmmfd_layout_t layout = {.struct_size = sizeof layout, .dtype = "float32", .dimensions = 1, .shape = shape};
    vmmfd_array_t *array;
    check(vmmfd_array_create(memory, &layout, &array));
    check(vmmfd_handoff_serve(path, array, NULL, NULL));
    vmmfd_array_free(array);
    vmmfd_memory_free(memory);
}

static void take(const vmmfd_device_t *device, const char *path) {
    float values[COUNT];
    vmmfd_array_t *array;
    vmmfd_memory_t *memory;
    vmmfd_layout_t layout = {.struct_size = sizeof layout};
    check(vmmfd_handoff_take(device, path, NULL, &array));
    check(vmmfd_array_info(array, &layout));
    check(vmmfd_array_memory(array, &memory));
    check(vmmfd_memory_copy_out(memory, layout.offset, values, sizeof values));
    printf("took %llu %s, the last is %g\n", (unsigned long long)layout.shape[0], layout.dtype, (double)values[COUNT - 1]);
    vmmfd_memory_free(memory);
    vmmfd_array_free(array);
}

int main(int argc, char **argv) {
    vmmfd_device_t *device;
    if (argc < 3 || (strcmp(argv[1], "serve") != 0 && strcmp(argv[1], "take") != 0))
        return fputs("usage: handoff serve|take PATH [cuda|host]\n", stderr), 2;
    check(vmmfd_device_open(argc > 3 ? argv[3] : NULL, NULL, &device));
    (strcmp(argv[1], "serve") == 0 ? serve : take)(device, argv[2]);
    vmmfd_device_free(device);
}
