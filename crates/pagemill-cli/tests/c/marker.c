/* A preload library of the user's own. */
#include <stdio.h>

__attribute__((constructor)) static void loaded(void) {
    fprintf(stderr, "marker loaded\n");
}
