/* family CASE: checks the behaviour of the functions of the malloc family. Each case is a function below. */
#include "check.h"

static void zero(void) {
    void *a = malloc(0), *b = malloc(0), *c = calloc(0, 8), *d = calloc(8, 0), *e = realloc(NULL, 0);
    CHECK(a && b && c && d && e && a != b);
    free(a), free(b), free(c), free(d), free(e);
    CHECK(malloc_usable_size(NULL) == 0);
    free(NULL);
    void *f = NULL;
    CHECK(posix_memalign(&f, 64, 0) == 0);
    free(f);
    f = aligned_alloc(4096, 0);
    CHECK((uintptr_t)f % 4096 == 0);
    free(f);
}

static void huge(void) {
    size_t sizes[] = {SIZE_MAX, SIZE_MAX - 1, SIZE_MAX - 4095, SIZE_MAX / 2, (size_t)PTRDIFF_MAX, (size_t)PTRDIFF_MAX + 1, SIZE_MAX - 65536, (size_t)1 << 62, (size_t)1 << 47};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t size = hidden(sizes[i]);
        char *small = malloc(100), *large = malloc(MIB);
        mark(small, 100, i), mark(large, MIB, i);
        errno = 0;
        CHECK(!malloc(size) && errno == ENOMEM);
        errno = 0;
        CHECK(!calloc(1, size) && errno == ENOMEM);
        errno = 0;
        CHECK(!calloc(size, 1) && errno == ENOMEM);
        errno = 0;
        CHECK(!realloc(small, size) && errno == ENOMEM);
        errno = 0;
        CHECK(!realloc(large, size) && errno == ENOMEM);
        errno = 0;
        CHECK(!reallocarray(large, size, 1) && errno == ENOMEM);
        errno = 0;
        CHECK(!memalign(64, size) && errno == ENOMEM);
        errno = 0;
        CHECK(!aligned_alloc(4096, size) && errno == ENOMEM);
        errno = 0;
        CHECK(!valloc(size) && errno == ENOMEM);
        errno = 0;
        CHECK(!pvalloc(size) && errno == ENOMEM);
        void *untouched = small;
        CHECK(posix_memalign(&untouched, 64, size) == ENOMEM && untouched == small);
        CHECK(is_marked(small, 100, 100, i) && is_marked(large, MIB, MIB, i));
        free(small), free(large);
    }
}

static void overflow(void) {
    size_t half = hidden(SIZE_MAX / 2 + 1), root = hidden((size_t)1 << 32);
    errno = 0;
    CHECK(!calloc(half, 2) && errno == ENOMEM);
    errno = 0;
    CHECK(!calloc(root, root) && errno == ENOMEM);
    errno = 0;
    CHECK(!calloc(half + 1, 2) && errno == ENOMEM);
    char *old = malloc(1000);
    mark(old, 1000, 7);
    errno = 0;
    CHECK(!reallocarray(old, root, root + 1) && errno == ENOMEM);
    errno = 0;
    CHECK(!reallocarray(NULL, half, 2) && errno == ENOMEM);
    CHECK(is_marked(old, 1000, 1000, 7));
    old = reallocarray(old, 1000, 100);
    CHECK(old && is_marked(old, 1000, 1000, 7) && malloc_usable_size(old) >= 100000);
    free(old);
}

static void resize(void) {
    size_t sizes[] = {1, 100, 5000, 65535, 65536, 100000, MIB, 2 * MIB, 3 * MIB, 9 * MIB};
    size_t count = sizeof sizes / sizeof *sizes;
    for (size_t i = 0; i < count; i++) {
        void *gone = malloc(sizes[i]);
        CHECK(gone && !realloc(gone, 0));
        for (size_t j = 0; j < count; j++) {
            size_t keep = sizes[i] < sizes[j] ? sizes[i] : sizes[j];
            unsigned char *memory = realloc(NULL, sizes[i]);
            CHECK(memory);
            for (size_t at = 0; at < sizes[i]; at++)
                memory[at] = (unsigned char)(at * 31 + at / 4096);
            memory = realloc(memory, sizes[j]);
            CHECK(memory && malloc_usable_size(memory) >= sizes[j]);
            for (size_t at = 0; at < keep; at++)
                CHECK(memory[at] == (unsigned char)(at * 31 + at / 4096));
            memset(memory, 1, malloc_usable_size(memory));
            free(memory);
        }
    }
}

static void alignment(void) {
    size_t bad[] = {0, 3, 5, 24, 48, 100, 4097, SIZE_MAX, SIZE_MAX - 1};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int local = 0;
        void *untouched = &local;
        errno = 0;
        CHECK(!aligned_alloc(hidden(bad[i]), 100) && errno == EINVAL);
        errno = 77;
        CHECK(posix_memalign(&untouched, hidden(bad[i]), 100) == EINVAL && untouched == &local && errno == 77);
    }
    void *small = NULL;
    CHECK(posix_memalign(&small, 4, 100) == EINVAL && posix_memalign(&small, 2, 100) == EINVAL && !small);
    CHECK(posix_memalign(&small, 1, 100) == EINVAL && !small);
    /* `memalign` rounds the alignment up to a power of two, as the C library's does. */
    for (size_t wish = 0; wish < 70000; wish = wish * 2 + 3) {
        size_t align = 1;
        while (align < wish)
            align *= 2;
        void *memory = memalign(wish, 100);
        CHECK(memory && (uintptr_t)memory % align == 0);
        free(memory);
    }
    errno = 0;
    CHECK(!memalign(hidden(SIZE_MAX), 100) && errno == EINVAL);
    size_t sizes[] = {0, 1, 16, 100, 4095, 65535, 65536, 65537, 100000, MIB, 2 * MIB + 1, 5 * MIB};
    for (size_t align = 1; align <= 64 * MIB; align *= 2)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            void *a = aligned_alloc(align, sizes[i]), *b = memalign(align, sizes[i]), *c = NULL;
            if (align >= sizeof(void *))
                CHECK(posix_memalign(&c, align, sizes[i]) == 0);
            CHECK(a && b && !((uintptr_t)a % align) && !((uintptr_t)b % align) && !((uintptr_t)c % align));
            CHECK(malloc_usable_size(a) >= sizes[i]);
            mark(a, sizes[i], 1), mark(b, sizes[i], 2), mark(c, c ? sizes[i] : 0, 3);
            CHECK(is_marked(a, sizes[i], sizes[i], 1) && is_marked(b, sizes[i], sizes[i], 2));
            a = realloc(a, sizes[i] + 70000);
            CHECK(a && is_marked(a, sizes[i], sizes[i], 1));
            free(a), free(b), free(c);
        }
    CHECK(malloc(1) && (uintptr_t)malloc(1) % 8 == 0 && (uintptr_t)malloc(16) % 16 == 0 && (uintptr_t)malloc(100) % 16 == 0);
}

static void pages(void) {
    size_t sizes[] = {0, 1, 4095, 4096, 4097, 65535, 65536, 200000, 3 * MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *a = valloc(sizes[i]), *b = pvalloc(sizes[i]);
        CHECK(a && b && (uintptr_t)a % 4096 == 0 && (uintptr_t)b % 4096 == 0);
        CHECK(malloc_usable_size(b) >= (sizes[i] + 4095) / 4096 * 4096);
        memset(b, 1, malloc_usable_size(b));
        free(a), free(b);
    }
}

static void usable(void) {
    for (size_t size = 1; size < 40 * MIB; size = size * 5 / 4 + 1) {
        unsigned char *memory = malloc(size);
        CHECK(memory);
        size_t all = malloc_usable_size(memory);
        CHECK(all >= size);
        memset(memory, 0xA5, all);
        unsigned char *other = malloc(size);
        memset(other, 0x5A, malloc_usable_size(other));
        CHECK(memory[all - 1] == 0xA5 && memory[0] == 0xA5);
        free(memory), free(other);
    }
}

static void keeps_errno(void) {
    for (size_t size = 1; size < 70 * MIB; size *= 4) {
        void *memory = malloc(size);
        mark(memory, size, 1);
        errno = 1234;
        free(memory);
        CHECK(errno == 1234);
        errno = 1234;
        free(NULL);
        CHECK(errno == 1234);
    }
    void *large[100];
    for (int i = 0; i < 100; i++)
        mark(large[i] = malloc(MIB), MIB, i);
    malloc_trim(0);
    errno = 1234;
    for (int i = 0; i < 100; i++)
        free(large[i]);
    CHECK(errno == 1234);
}

/* malloc_trim gives freed memory back to the system and returns 1. A second call finds no free memory and
 * returns 0. */
static void trim(void) {
    enum { COUNT = 128, SMALL = 20000 };
    static void *large[COUNT], *small[SMALL];
    for (int i = 0; i < COUNT; i++)
        memset(large[i] = malloc(MIB), 1, MIB);
    for (int i = 0; i < SMALL; i++)
        memset(small[i] = malloc(1000), 1, 1000);
    size_t full = resident();
    for (int i = 0; i < COUNT; i++)
        free(large[i]);
    for (int i = 0; i < SMALL; i++)
        free(small[i]);
    CHECK(malloc_trim(0) == 1);
    size_t after = resident();
    fprintf(stderr, "resident: %zu full, %zu after\n", full, after);
    CHECK(full > 140 * MIB && after < full - 130 * MIB);
    malloc_trim(0);
    CHECK(malloc_trim(0) == 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(is_zero(large[i] = calloc(1, MIB), MIB));
}

/* calloc returns zeros, even if the memory was written, freed, trimmed, moved or shrunk before. */
static void zeroed(void) {
    size_t sizes[] = {1, 8, 100, 1000, 4096, 14000, 33000, 65535, 65536, 65537, 100000, 500000, MIB, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB, 20 * MIB, 33 * MIB, 70 * MIB};
    for (int round = 0; round < 3; round++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            enum { COUNT = 3 };
            unsigned char *dirty[COUNT];
            for (int k = 0; k < COUNT; k++)
                memset(dirty[k] = malloc(sizes[i]), 0xFF, sizes[i]);
            for (int k = 0; k < COUNT; k++)
                free(dirty[k]);
            if (round == 1)
                malloc_trim(0);
            for (int k = 0; k < COUNT; k++) {
                dirty[k] = calloc(1, sizes[i]);
                CHECK(dirty[k] && is_zero(dirty[k], sizes[i]));
                memset(dirty[k], 0xFF, sizes[i]);
                if (round == 2) {
                    dirty[k] = realloc(dirty[k], sizes[i] / 3 + 1);
                    dirty[k] = realloc(dirty[k], sizes[i]);
                    memset(dirty[k], 0xFF, sizes[i]);
                }
            }
            for (int k = 0; k < COUNT; k++)
                free(dirty[k]);
            void *other = calloc(sizes[i], 1);
            CHECK(is_zero(other, sizes[i]));
            free(other);
        }
}

/* `free` accepts memory that functions of the C library allocated. */
static void borrowed(void) {
    char *line = NULL;
    size_t room = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    if (file) {
        while (getline(&line, &room, file) >= 0)
            ;
        fclose(file);
    }
    free(line);
    char *text = strdup("text"), *made = NULL;
    CHECK(asprintf(&made, "%s %s", text, text) == 9);
    free(text), free(made);
    char *where = getcwd(NULL, 0);
    CHECK(where);
    free(where);
}

int main(int argc, char **argv) {
    struct { const char *name; void (*run)(void); } cases[] = {
        {"zero", zero}, {"huge", huge}, {"overflow", overflow}, {"resize", resize}, {"alignment", alignment}, {"pages", pages},
        {"usable", usable}, {"errno", keeps_errno}, {"trim", trim}, {"zeroed", zeroed}, {"borrowed", borrowed},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            return 0;
        }
    return 98;
}
