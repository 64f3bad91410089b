/* Marks and reads strict memory, a part of which is purged because of the limit of the program's control group. Also
 * installs a SIGSEGV handler after the first strict mark. */
#include "pagemill.h"

#include <assert.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static sigjmp_buf jump_target;
static void *volatile fault_addr;

static void jump_back(int number, siginfo_t *info, void *context)
{
	(void)context;
	fault_addr = info->si_addr;
	siglongjmp(jump_target, number);
}

static void forward_or_jump(int number, siginfo_t *info, void *context)
{
	if (!pagemill_handle_fault(number, info, context))
		jump_back(number, info, context);
}

static void set_handler(int number, void (*handler)(int, siginfo_t *, void *))
{
	struct sigaction action = { .sa_sigaction = handler, .sa_flags = SA_SIGINFO };
	assert(sigaction(number, &action, NULL) == 0);
}

/* Returns the signal that reading here raises, or 0 if the byte is as written. */
static int read_byte(volatile char *at)
{
	int number = sigsetjmp(jump_target, 1);
	if (number == 0)
		assert(*at == 7);
	else
		assert(fault_addr == (void *)at);
	return number;
}

int main(int argc, char **argv)
{
	size_t len = 4 << 20, page = sysconf(_SC_PAGESIZE), count = argc > 1 ? strtoul(argv[1], NULL, 10) / 4 : 4, gone = 0;
	char **pieces = calloc(count, sizeof *pieces);
	set_handler(SIGBUS, jump_back);
	for (size_t index = 0; index < count; index++) {
		pieces[index] = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		assert(pieces[index] != MAP_FAILED);
		memset(pieces[index], 7, len);
		ssize_t marked = pagemill_vrange(pieces[index], len, PAGEMILL_VOLATILE_STRICT, PAGEMILL_FULL, NULL);
		if (marked < 0 && errno == EOPNOTSUPP) {
			puts("skipped: no guard pages here");
			return 0;
		}
		assert(marked == (ssize_t)len);
		if (index == 0)
			set_handler(SIGSEGV, forward_or_jump);
	}
	for (size_t index = 0; index < count; index++) {
		int signals = 0, purged;
		for (size_t at = 0; at < len; at += page) {
			int number = read_byte(pieces[index] + at);
			assert(number == 0 || number == SIGBUS);
			signals += number == SIGBUS;
		}
		assert(pagemill_vrange(pieces[index], len, PAGEMILL_NONVOLATILE, PAGEMILL_FULL, &purged) == (ssize_t)len);
		assert(purged || signals == 0);
		gone += signals == (int)(len / page);
		memset(pieces[index], 7, len);
		munmap(pieces[index], len);
	}
	assert(read_byte(NULL) == SIGSEGV);
	printf("%zu of %zu gone\n", gone, count);
	return 0;
}
