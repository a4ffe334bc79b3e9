/* What publisher and subscriber share: the names, and the layout of the object. */
#ifndef FRAMES_H
#define FRAMES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vmmfd.h>

enum { BUFFERS = 4, HEIGHT = 480, WIDTH = 640 };

/* A small record over the socket: a frame is ready, or its buffer is free again. The frame itself stays in GPU memory. */
struct turn {
    uint64_t frame;
    uint32_t buffer;
};

static inline void check(vmmfd_error_t *error) {
    if (error == NULL)
        return;
    fprintf(stderr, "frames: %s%s%s\n", error->message, error->hint ? ": " : "", error->hint ? error->hint : "");
    vmmfd_error_free(error);
    exit(1);
}

static inline void require(int condition, const char *message) {
    if (!condition) {
        perror(message);
        exit(1);
    }
}

#endif
