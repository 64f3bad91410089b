/* Asserts that 64 MiB are giveable while they are marked volatile, and not after they were unmarked. */
#include "pagemill.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

static struct pagemill_figures read_figures(void)
{
	struct pagemill_figures figures;
	assert(pagemill_figures(&figures) == 0);
	assert(figures.net <= figures.resident);
	return figures;
}

int main(void)
{
	const size_t len = 64 << 20;
	char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int purged = -1;
	assert(addr != MAP_FAILED);
	memset(addr, 7, len);
	struct pagemill_figures before = read_figures();
	assert(pagemill_vrange(addr, len, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL) == (ssize_t)len);
	struct pagemill_figures marked = read_figures();
	assert(pagemill_vrange(addr, len, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) == (ssize_t)len);
	struct pagemill_figures unmarked = read_figures();
	assert(purged == 0);
	assert(marked.giveable - before.giveable == len);
	assert(unmarked.giveable == before.giveable);
	printf("%zu MiB giveable while marked\n", (size_t)(marked.giveable - before.giveable) >> 20);
	return 0;
}
