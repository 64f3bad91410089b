/* A preload library that the user chose. It prints a line when it is loaded. */
#include <stdio.h>

__attribute__((constructor)) static void loaded(void) {
    fprintf(stderr, "marker loaded\n");
}
