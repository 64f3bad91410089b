/* A preload library for language runtimes with signal handlers of their own. It purges pages before the
 * runtime starts, and checks at the end that access to these pages still raises the right signal. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char *area;
static int is_unsupported;
static sigjmp_buf back;

static void jump(int number)
{
	siglongjmp(back, number);
}

__attribute__((constructor)) static void begin(void)
{
	ssize_t (*vrange)(void *, size_t, int, int, int *) = (void *)dlsym(RTLD_DEFAULT, "pagemill_vrange");
	size_t len = 1 << 20;
	if (!vrange)
		return; /* in the process of `pagemill run`, which executes the program later */
	area = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(area, 7, len);
	is_unsupported = vrange(area, len, 2, 0, NULL) < 0 && errno == EOPNOTSUPP;
	malloc_trim(0);
}

/* Returns the signal that access to a purged page raises now. */
int strict_signal(void)
{
	if (is_unsupported)
		return SIGBUS;
	struct sigaction before, action = { .sa_handler = jump, .sa_flags = SA_ONSTACK };
	sigaction(SIGBUS, &action, &before);
	int number = sigsetjmp(back, 1);
	if (number == 0 && area)
		(void)*(volatile char *)area;
	sigaction(SIGBUS, &before, NULL);
	return number;
}

__attribute__((destructor)) static void end(void)
{
	if (area && strict_signal() != SIGBUS) {
		fputs("a purged page raised nothing\n", stderr);
		_exit(7);
	}
	if (area)
		fputs("looked once more\n", stderr);
}
