/* Tests marking, unmarking and invalid arguments. With one argument, then marks that many MiB, which may exceed the
 * limit of the program's control group. With two arguments, see hold_marked(). */
#include "pagemill.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static size_t page;

static char *map(size_t len)
{
	char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert(addr != MAP_FAILED);
	memset(addr, 7, len);
	return addr;
}

static void expect_error(ssize_t result, int error)
{
	assert(result == -1);
	assert(errno == error);
}

static void test_marks(void)
{
	int purged = 5;
	char *area = map(16 * page);

	assert(pagemill_vrange(area, 16 * page, PAGEMILL_VOLATILE, PAGEMILL_FULL, &purged) == (ssize_t)(16 * page));
	assert(purged == 0);
	assert(pagemill_vrange(area, 4 * page, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, NULL) == (ssize_t)(4 * page));
	assert(pagemill_vrange(area, 16 * page, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) == (ssize_t)(12 * page));
	assert(purged == 0 && area[15 * page] == 7);

	expect_error(pagemill_vrange(area + 1, page, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL), EINVAL);
	expect_error(pagemill_vrange(area, page + 1, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL), EINVAL);
	expect_error(pagemill_vrange(area, page, 3, PAGEMILL_FULL, NULL), EINVAL);
	expect_error(pagemill_vrange(area, page, PAGEMILL_VOLATILE, -1, NULL), EINVAL);
	expect_error(pagemill_vrange(area, page, PAGEMILL_VOLATILE, PAGEMILL_FULL, (int *)16), EFAULT);
	munmap(area + 8 * page, page);
	expect_error(pagemill_vrange(area, 16 * page, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL), ENOMEM);
	assert(pagemill_vrange(area, 16 * page, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, NULL) == -1);
	munmap(area, 16 * page);
}

/* A child inherits the marks of its parent. Unmarking them in the child must not affect those of the parent. */
static void test_fork(void)
{
	char *area = map(16 * page);
	assert(pagemill_vrange(area, 16 * page, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL) > 0);
	pid_t child = fork();
	if (child == 0)
		_exit(pagemill_vrange(area, 16 * page, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, NULL) != (ssize_t)(16 * page));
	int status;
	assert(waitpid(child, &status, 0) == child && status == 0);
	assert(pagemill_vrange(area, 16 * page, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, NULL) == (ssize_t)(16 * page));
	munmap(area, 16 * page);
}

/* Fills and marks pieces of 4 MiB, then unmarks all and counts those that were purged. */
static void mark_and_unmark(size_t mib)
{
	size_t len = 4 << 20, count = mib / 4, gone = 0;
	char **pieces = calloc(count, sizeof *pieces);
	for (size_t index = 0; index < count; index++) {
		pieces[index] = map(len);
		assert(pagemill_vrange(pieces[index], len, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL) == (ssize_t)len);
	}
	for (size_t index = 0; index < count; index++) {
		int purged;
		assert(pagemill_vrange(pieces[index], len, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) == (ssize_t)len);
		assert(purged || (pieces[index][0] == 7 && pieces[index][len - 1] == 7));
		gone += purged;
	}
	printf("%zu of %zu gone\n", gone, count);
}

/* Marks memory, waits until standard input ends, then prints how many MiB were purged meanwhile. */
static void hold_marked(size_t mib)
{
	size_t len = (size_t)mib << 20;
	char *area = map(len);
	int purged;
	for (size_t at = 0; at < len; at += 1 << 20)
		assert(pagemill_vrange(area + at, 1 << 20, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL) == 1 << 20);
	printf("ready\n");
	fflush(stdout);
	getchar();
	size_t gone = 0;
	for (size_t at = 0; at < len; at += 1 << 20) {
		assert(pagemill_vrange(area + at, 1 << 20, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) == 1 << 20);
		assert(purged || area[at] == 7);
		gone += purged;
	}
	printf("%zu of %zu gone\n", gone, mib);
}

int main(int argc, char **argv)
{
	page = sysconf(_SC_PAGESIZE);
	test_marks();
	test_fork();
	if (argc > 2)
		hold_marked(strtoul(argv[2], NULL, 10));
	else if (argc > 1)
		mark_and_unmark(strtoul(argv[1], NULL, 10));
	return 0;
}
