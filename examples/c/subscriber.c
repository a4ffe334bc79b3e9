/* Receives the frames of publisher.c: subscriber BROKER SOCKET
 *
 * It maps the object once. Each frame then costs one record in each direction, whatever its size.
 *
 *   cc -std=c11 -Wall -Wextra -pedantic subscriber.c -o subscriber $(pkg-config --cflags --libs vmmfd) */
#define _GNU_SOURCE
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "frames.h"

/* Connects to the publisher, which may start later. */
static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    int publisher = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    for (int tries = 0; connect(publisher, (struct sockaddr *)&address, sizeof address) != 0; tries++) {
        require(tries < 1000, path);
        nanosleep(&pause, NULL);
    }
    return publisher;
}

int main(int argc, char **argv) {
    static unsigned char frame[HEIGHT * WIDTH];
    vmmfd_broker_t *broker;
    vmmfd_lease_t *lease;
    vmmfd_memory_t *buffers[BUFFERS];
    vmmfd_layout_t layouts[BUFFERS];
    vmmfd_array_t *arrays[BUFFERS];
    if (argc < 3)
        return fputs("usage: subscriber BROKER SOCKET\n", stderr), 2;
    check(vmmfd_broker_connect(argv[1], NULL, &broker));
    vmmfd_get_options_t options = {VMMFD_GET_OPTIONS, .wait_ms = 30000, .expect = "{\"encoding\": \"mono8\"}"};
    check(vmmfd_broker_get(broker, NULL, "camera", &options, &lease));
    for (int i = 0; i < BUFFERS; i++) {
        char name[16];
        snprintf(name, sizeof name, "frame%d", i);
        check(vmmfd_lease_array(lease, NULL, name, &arrays[i]));
        layouts[i].struct_size = sizeof layouts[i];
        check(vmmfd_array_info(arrays[i], &layouts[i]));
        check(vmmfd_array_memory(arrays[i], &buffers[i]));
    }
    int publisher = connect_to(argv[2]);
    struct turn turn;
    uint64_t frames = 0;
    while (recv(publisher, &turn, sizeof turn, 0) == sizeof turn && turn.buffer < BUFFERS) {
        /* A program with a GPU launches its kernels on the address of vmmfd_memory_info instead. */
        check(vmmfd_memory_copy_out(buffers[turn.buffer], layouts[turn.buffer].offset, frame, sizeof frame));
        unsigned char value = (unsigned char)(turn.frame % 251);
        if (turn.frame != frames || frame[0] != value || frame[sizeof frame - 1] != value) {
            fprintf(stderr, "frames: frame %llu has wrong bytes\n", (unsigned long long)turn.frame);
            return 1;
        }
        frames++;
        require(send(publisher, &turn, sizeof turn, MSG_NOSIGNAL) == sizeof turn, "send");
    }
    printf("received %llu frames\n", (unsigned long long)frames);
    close(publisher);
    for (int i = 0; i < BUFFERS; i++) {
        vmmfd_memory_free(buffers[i]);
        vmmfd_array_free(arrays[i]);
    }
    vmmfd_lease_free(lease);
    vmmfd_broker_free(broker);
}
