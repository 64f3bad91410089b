/* forked MIB KIB CHILDREN: allocates MIB in allocations of KIB, writes and frees them. Then each of CHILDREN
 * children allocates and writes as much as it gets, at most MIB, and keeps it until all children have
 * finished allocating. Prints the MiB of all children together. */
#include "check.h"

static size_t fill(size_t pieces, size_t size, char **held) {
    size_t got = 0;
    while (got < pieces && (held[got] = malloc(size))) {
        memset(held[got], (int)(got & 127) + 1, size);
        got++;
    }
    return got;
}

int main(int argc, char **argv) {
    size_t size = atoi(argv[2]) * KIB, pieces = atoi(argv[1]) * MIB / size;
    int children = atoi(argv[3]), done[2], hold[2];
    char **held = calloc(pieces, sizeof *held);
    CHECK(held && pipe(done) == 0 && pipe(hold) == 0);
    CHECK(fill(pieces, size, held) == pieces);
    for (size_t i = 0; i < pieces; i++) free(held[i]);
    for (int child = 0; child < children; child++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            close(hold[1]);
            size_t got = fill(pieces, size, held);
            CHECK(write(done[1], &got, sizeof got) == sizeof got);
            char end;
            CHECK(read(hold[0], &end, 1) == 0);
            for (size_t i = 0; i < got; i++)
                for (size_t at = 0; at < size; at += 4096) CHECK(held[i][at] == (char)((i & 127) + 1));
            _exit(0);
        }
    }
    size_t sum = 0, got;
    for (int child = 0; child < children; child++) {
        CHECK(read(done[0], &got, sizeof got) == sizeof got);
        sum += got * size;
    }
    close(hold[1]);
    for (int child = 0; child < children; child++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    printf("%zu\n", sum / MIB);
    return 0;
}
