/* squeeze MIB: allocates and frees MIB, then maps as much without malloc, 1 MiB every few milliseconds. The
 * allocator learns of the mapped memory only from the usage of its control group. */
#include "check.h"
#include <sys/mman.h>

int main(int argc, char **argv) {
    enum { MOST = 256, PIECES = 4 };
    static char *held[MOST * PIECES];
    int count = atoi(argv[1]);
    CHECK(argc == 2 && count <= MOST);
    for (int i = 0; i < count * PIECES; i++) {
        CHECK(held[i] = malloc(MIB / PIECES));
        memset(held[i], 1, MIB / PIECES);
    }
    for (int i = 0; i < count * PIECES; i++) free(held[i]);
    for (int i = 0; i < count; i++) {
        char *mapped = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(mapped != MAP_FAILED);
        memset(mapped, 1, MIB);
        usleep(5000);
    }
    return 0;
}
