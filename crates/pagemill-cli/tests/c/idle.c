/* Allocates 100 MiB in allocations of 1 MiB, frees them, and sleeps for an hour. */
#include "check.h"

int main(void) {
    enum { COUNT = 100 };
    static char *held[COUNT];
    for (int i = 0; i < COUNT; i++) {
        held[i] = malloc(MIB);
        CHECK(held[i]);
        memset(held[i], 1, MIB);
    }
    for (int i = 0; i < COUNT; i++) free(held[i]);
    sleep(3600);
    return 0;
}
