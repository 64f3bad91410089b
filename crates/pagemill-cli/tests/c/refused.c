/* At the limit, calls realloc with larger and smaller sizes. Whether a call fails or not, the contents stay
 * intact. */
#include "check.h"

static char *filler[4096];

int main(void) {
    size_t sizes[] = {100000, 300000, 3 * MIB, 9 * MIB};
    for (int i = 0; i < 4; i++) {
        size_t size = sizes[i];
        char *held = malloc(size);
        CHECK(held);
        mark(held, size, 5);
        long count = 0;
        while (count < 4096 && (filler[count] = malloc(256 * KIB))) {
            mark(filler[count], 256 * KIB, count);
            count++;
        }
        CHECK(count < 4096 && errno == ENOMEM);
        size_t wishes[] = {size + 40 * MIB, size * 2, size * 7 / 8, size * 3 / 4, size / 2, size / 4};
        for (int k = 0; k < 6; k++) {
            char *other = realloc(held, wishes[k]);
            if (!other)
                dprintf(2, "realloc of %zu to %zu is refused\n", size, wishes[k]);
            CHECK(is_marked(other ? other : held, other && wishes[k] < size ? wishes[k] : size, size, 5));
            if (other) {
                held = other;
                size = wishes[k] < size ? wishes[k] : size;
                mark(held, size, 5);
            }
        }
        free(held);
        for (long k = 0; k < count; k++) {
            CHECK(is_marked(filler[k], 256 * KIB, 256 * KIB, k));
            free(filler[k]);
        }
    }
    return 0;
}
