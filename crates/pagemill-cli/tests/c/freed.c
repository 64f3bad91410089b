/* freed SIZE MIB: allocates MIB in allocations of SIZE bytes and frees them. Then works a fifth of the time,
 * with small allocations, until it is killed. */
#include "check.h"

int main(int count, char **words) {
    CHECK(count == 3);
    size_t size = strtoul(words[1], NULL, 10), pieces = strtoul(words[2], NULL, 10) * MIB / size;
    char **held = malloc(pieces * sizeof *held);
    CHECK(held);
    for (size_t i = 0; i < pieces; i++) {
        held[i] = malloc(size);
        CHECK(held[i]);
        memset(held[i], 1, size);
    }
    for (size_t i = 0; i < pieces; i++) free(held[i]);
    free(held);
    for (;;) {
        clock_t until = clock() + CLOCKS_PER_SEC / 500;
        while (clock() < until) {
            char *volatile some = malloc(100);
            free(some);
        }
        usleep(8000);
    }
}
