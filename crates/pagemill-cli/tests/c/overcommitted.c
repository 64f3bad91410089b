/* Allocates 180 MiB, which Pagemill overcommits, writes and frees them, and then makes no allocator call. */
#include "check.h"

int main(void) {
    size_t len = 180 * MIB;
    char *bytes = calloc(1, len);
    CHECK(bytes);
    memset(bytes, 1, len);
    free(bytes);
    sleep(3600);
    return 0;
}
