/* Marks memory and prints three PIDs: its own, that of a child that also marks memory, and that of a child that does
 * not. The test lists their ranges and then closes standard input. With one argument, first marks memory and then
 * executes itself. */
#include "pagemill.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void mark_pages(size_t pages)
{
	size_t len = pages * sysconf(_SC_PAGESIZE);
	char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert(addr != MAP_FAILED);
	memset(addr, 7, len);
	assert(pagemill_vrange(addr, len, PAGEMILL_VOLATILE, PAGEMILL_FULL, NULL) == (ssize_t)len);
}

/* Forks a child that marks this many pages and stays until the other end of the pipe is closed. */
static pid_t fork_child(const int *ends, const int *ready, size_t pages)
{
	pid_t pid = fork();
	assert(pid >= 0);
	if (pid > 0)
		return pid;
	char byte = 1;
	close(ends[1]);
	if (pages)
		mark_pages(pages);
	assert(write(ready[1], &byte, 1) == 1);
	assert(read(ends[0], &byte, 1) == 0);
	exit(0);
}

int main(int argc, char **argv)
{
	int ends[2], ready[2], status;
	char bytes[2];
	if (argc == 2) {
		mark_pages(3);
		execl(argv[0], argv[0], "become", "it", (char *)NULL);
		assert(0);
	}
	mark_pages(16);
	assert(pipe(ends) == 0 && pipe(ready) == 0);
	pid_t marks = fork_child(ends, ready, 4), idle = fork_child(ends, ready, 0);
	assert(read(ready[0], bytes, 1) == 1 && read(ready[0], bytes + 1, 1) == 1);
	printf("%d %d %d\n", getpid(), marks, idle);
	fflush(stdout);
	getchar();
	close(ends[1]);
	assert(waitpid(marks, &status, 0) == marks && status == 0);
	assert(waitpid(idle, &status, 0) == idle && status == 0);
	return 0;
}
