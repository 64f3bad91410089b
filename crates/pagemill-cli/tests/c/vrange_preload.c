/* vrange_preload [MIB]: memory that is unmapped, replaced, moved or freed is no longer volatile. Then marks
 * MIB, more than the limit of the program's group. */
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

static ssize_t (*vrange)(void *addr, size_t len, int mode, int behaviour, int *purged);

static char *map(size_t len)
{
	char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert(addr != MAP_FAILED);
	memset(addr, 7, len);
	return addr;
}

static ssize_t marked(char *addr, size_t len)
{
	return vrange(addr, len, 0, 0, NULL);
}

static void ends(void)
{
	size_t page = sysconf(_SC_PAGESIZE), len = 16 * page;

	char *area = map(len);
	assert(vrange(area, len, 1, 0, NULL) == (ssize_t)len);
	assert(munmap(area + 8 * page, 8 * page) == 0);
	assert(mmap(area + 8 * page, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
	assert(marked(area, len) == (ssize_t)(8 * page));

	assert(vrange(area, len, 1, 0, NULL) == (ssize_t)len);
	assert(mmap(area, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == area);
	assert(madvise(area + page, page, MADV_DONTNEED) == 0);
	assert(madvise(area + 2 * page, page, MADV_SEQUENTIAL) == 0);
	assert(marked(area, len) == (ssize_t)(14 * page));

	munmap(area, len);
	area = map(len);
	assert(vrange(area, len, 1, 0, NULL) == (ssize_t)len);
	char *moved = mremap(area, len, 2 * len, MREMAP_MAYMOVE);
	assert(moved != MAP_FAILED && marked(moved, 2 * len) == 0);
	munmap(moved, 2 * len);

	char *large = aligned_alloc(page, 1 << 20);
	assert(vrange(large, 1 << 20, 1, 0, NULL) == 1 << 20);
	free(large);
	large = aligned_alloc(page, 1 << 20);
	assert(marked(large, 1 << 20) == 0);
	memset(large, 1, 1 << 20);
	assert(vrange(large, 1 << 20, 1, 0, NULL) == 1 << 20);
	malloc_trim(0);
	int purged;
	assert(vrange(large, 1 << 20, 0, 0, &purged) == 1 << 20);
	assert(purged && large[0] == 0);
	free(large);
}

static void fill(size_t mib)
{
	size_t len = 4 << 20, count = mib / 4, gone = 0;
	char **pieces = calloc(count, sizeof *pieces);
	for (size_t index = 0; index < count; index++) {
		pieces[index] = map(len);
		assert(vrange(pieces[index], len, 1, 0, NULL) == (ssize_t)len);
	}
	for (size_t index = 0; index < count; index++) {
		int purged;
		assert(vrange(pieces[index], len, 0, 0, &purged) == (ssize_t)len);
		assert(purged || (pieces[index][0] == 7 && pieces[index][len - 1] == 7));
		gone += purged;
	}
	printf("%zu of %zu gone\n", gone, count);
}

int main(int argc, char **argv)
{
	*(void **)&vrange = dlsym(RTLD_DEFAULT, "pagemill_vrange");
	assert(vrange);
	ends();
	if (argc > 1)
		fill(strtoul(argv[1], NULL, 10));
	return 0;
}
