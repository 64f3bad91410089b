/* pages MIB SLOT_KIB STRIDE_KIB: allocates MIB in pieces of SLOT_KIB, writes one byte every STRIDE_KIB, and prints:
 * page faults and KiB that became resident (RssAnon) during the allocations, then during the writes, then the KiB of
 * huge pages. At the end it grows an allocation of 8 MiB to 24 MiB, and exits with 1 if bytes are lost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static long faults(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
}

/* Returns the number behind `name` in a file of the kernel. */
static long field(const char *path, const char *name) {
    FILE *file = fopen(path, "r");
    char line[256];
    long value = -1;
    while (file && fgets(line, sizeof line, file)) {
        if (!strncmp(line, name, strlen(name))) value = atol(line + strlen(name));
    }
    if (file) fclose(file);
    return value;
}

static long resident(void) { return field("/proc/self/status", "RssAnon:"); }

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size_t total = strtoul(argv[1], NULL, 10) << 20, slot = strtoul(argv[2], NULL, 10) << 10;
    size_t stride = strtoul(argv[3], NULL, 10) << 10, count = total / slot;
    char **pieces = calloc(count, sizeof *pieces);
    long faults_before = faults(), resident_before = resident();
    for (size_t i = 0; i < count; i++) {
        if (!(pieces[i] = malloc(slot))) return 1;
    }
    long faults_allocated = faults(), resident_allocated = resident();
    for (size_t i = 0; i < count; i++) {
        for (size_t at = 0; at < slot; at += stride) pieces[i][at] = 1;
    }
    long faults_written = faults(), resident_written = resident();
    printf("%ld %ld %ld %ld %ld\n", faults_allocated - faults_before, resident_allocated - resident_before,
           faults_written - faults_allocated, resident_written - resident_allocated,
           field("/proc/self/smaps_rollup", "AnonHugePages:"));

    size_t len = 8 << 20;
    char *bytes = malloc(len);
    if (!bytes) return 1;
    for (size_t at = 0; at < len; at += 512) bytes[at] = (char)(at / 512 % 251);
    bytes = realloc(bytes, 3 * len);
    if (!bytes) return 1;
    for (size_t at = 0; at < len; at += 512) {
        if (bytes[at] != (char)(at / 512 % 251)) return 1;
    }
    return 0;
}
