/* strict_preload CASE: strict volatile ranges in a preloaded program. `handlers` checks the signal of each
 * fault, for every order of installing handlers. The other cases end the program by a signal. */
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static ssize_t (*vrange)(void *addr, size_t len, int mode, int behaviour, int *purged);
static size_t page, len;
static sigjmp_buf back;
static volatile int count;
static volatile siginfo_t last;
static char *volatile stack_top;
static volatile int nested_blocked;

static char *map(void)
{
	char *addr = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert(addr != MAP_FAILED);
	memset(addr, 7, len);
	return addr;
}

/* Returns the address of purged pages, which raise SIGBUS. */
static char *purged(void)
{
	char *area = map();
	if (vrange(area, len, 2, 0, NULL) < 0) {
		assert(errno == EOPNOTSUPP);
		puts("skipped: no guard pages here");
		exit(0);
	}
	malloc_trim(0);
	return area;
}

static void jump(int number, siginfo_t *info, void *context)
{
	char here;
	sigset_t mask;
	count++;
	last = *info;
	stack_top = &here;
	sigprocmask(SIG_BLOCK, NULL, &mask);
	nested_blocked = sigismember(&mask, number);
	siglongjmp(back, 1);
}

static void set(int number, int flags)
{
	struct sigaction action = { .sa_sigaction = jump, .sa_flags = SA_SIGINFO | flags };
	assert(sigaction(number, &action, NULL) == 0);
}

/* Returns the signal that a read of this address raises, or 0. */
static int touch(volatile char *at)
{
	memset((void *)&last, 0, sizeof last);
	if (sigsetjmp(back, 1) == 0) {
		(void)*at;
		return 0;
	}
	assert(last.si_addr == (void *)at);
	return last.si_signo;
}

static char *closed(void)
{
	char *area = map();
	assert(mprotect(area, len, PROT_NONE) == 0);
	return area;
}

static void *in_thread(void *area)
{
	assert(touch((char *)area + page) == SIGBUS);
	return NULL;
}

/* Handlers that the program installed before or after its first strict mark are called. sigaction returns
 * these handlers, and not those of Pagemill. */
static void handlers(void)
{
	struct sigaction action;
	set(SIGBUS, 0);
	set(SIGSEGV, 0);
	char *area = purged(), *none = closed();
	assert(touch(area) == SIGBUS && touch(none) == SIGSEGV && touch((char *)8) == SIGSEGV);
	assert(last.si_code == SEGV_MAPERR && nested_blocked);
	assert(sigaction(SIGSEGV, NULL, &action) == 0);
	assert(action.sa_sigaction == jump && (action.sa_flags & SA_SIGINFO) && !(action.sa_flags & SA_ONSTACK));

	/* Handlers are installed again, by sigaction and by signal. */
	set(SIGSEGV, SA_NODEFER);
	assert(touch(area) == SIGBUS && touch(none) == SIGSEGV && !nested_blocked);
	assert(signal(SIGSEGV, (sighandler_t)jump) == (sighandler_t)jump);
	assert(signal(SIGSEGV, SIG_DFL) == (sighandler_t)jump);
	assert(touch(area) == SIGBUS);
	set(SIGSEGV, SA_RESETHAND);
	assert(touch(none) == SIGSEGV);
	assert(sigaction(SIGSEGV, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
	assert(touch(area) == SIGBUS);

	/* A handler runs on the alternate stack only if the program set SA_ONSTACK. */
	stack_t stack = { .ss_sp = malloc(1 << 16), .ss_size = 1 << 16 };
	assert(sigaltstack(&stack, NULL) == 0);
	set(SIGSEGV, SA_ONSTACK);
	assert(touch(none) == SIGSEGV);
	assert((size_t)(stack_top - (char *)stack.ss_sp) < stack.ss_size);
	set(SIGSEGV, 0);
	assert(touch(none) == SIGSEGV);
	assert((size_t)(stack_top - (char *)stack.ss_sp) >= stack.ss_size);
	assert(touch(area) == SIGBUS);

	/* A signal that is sent by kill reaches the handler. */
	if (sigsetjmp(back, 1) == 0)
		kill(getpid(), SIGSEGV);
	assert(last.si_signo == SIGSEGV && last.si_code == SI_USER && last.si_pid == getpid());
	signal(SIGSEGV, SIG_IGN);
	kill(getpid(), SIGSEGV);
	set(SIGSEGV, 0);

	/* Faults raise the right signals in a thread, in a forked child, and after a vfork whose child changes a
	 * handler. */
	pthread_t thread;
	assert(pthread_create(&thread, NULL, in_thread, area) == 0 && pthread_join(thread, NULL) == 0);
	int status;
	pid_t child = fork();
	if (child == 0)
		_exit(touch(area) != SIGBUS || touch(none) != SIGSEGV || vrange(area, len, 0, 0, NULL) != (ssize_t)len
		      || touch(area) != 0);
	assert(waitpid(child, &status, 0) == child && status == 0);
	child = vfork();
	if (child == 0) {
		signal(SIGSEGV, SIG_DFL);
		_exit(0);
	}
	assert(waitpid(child, &status, 0) == child && status == 0);
	assert(touch(none) == SIGSEGV && touch(area) == SIGBUS);

	/* Calls that fail change nothing. */
	assert(munmap(area + 1, page) == -1 && madvise(area + 1, page, MADV_DONTNEED) == -1);
	assert(mremap(area, len, 0, 0) == MAP_FAILED && touch(area) == SIGBUS);

	/* Unmapped, discarded or freed memory has no guards. Protected memory raises SIGSEGV. */
	assert(madvise(area, page, MADV_DONTNEED) == 0 && touch(area) == 0 && touch(area + page) == SIGBUS);
	assert(munmap(area, 4 * page) == 0 && touch(area + page) == SIGSEGV);
	char *other = map();
	assert(vrange(other, len, 2, 0, NULL) == (ssize_t)len && mprotect(other, page, PROT_NONE) == 0);
	malloc_trim(0);
	assert(touch(other) == SIGSEGV);
	char *large = aligned_alloc(page, 1 << 20);
	memset(large, 7, 1 << 20);
	assert(vrange(large, 1 << 20, 2, 0, NULL) == 1 << 20);
	malloc_trim(0);
	assert(touch(large) == SIGBUS);
	free(large);
	large = aligned_alloc(page, 1 << 20);
	memset(large, 7, 1 << 20);
	assert(vrange(large, 1 << 20, 2, 0, NULL) == 1 << 20);
	malloc_trim(0);
	char *small = realloc(large, 1000);
	assert(small && touch(small) == 0);
	free(small);
	puts("handlers");
}

int main(int argc, char **argv)
{
	const char *how = argv[1];
	sigset_t bus;
	page = sysconf(_SC_PAGESIZE);
	len = 16 * page;
	*(void **)&vrange = dlsym(RTLD_DEFAULT, "pagemill_vrange");
	assert(vrange);
	if (strcmp(how, "handlers") == 0) {
		handlers();
		return 0;
	}
	volatile char *area = purged();
	puts("marked");
	fflush(stdout);
	if (strcmp(how, "ignored") == 0)
		signal(SIGBUS, SIG_IGN);
	sigemptyset(&bus);
	sigaddset(&bus, SIGBUS);
	if (strcmp(how, "blocked") == 0)
		sigprocmask(SIG_BLOCK, &bus, NULL);
	if (strcmp(how, "null") == 0)
		area = NULL;
	if (strcmp(how, "ignored-null") == 0) {
		signal(SIGSEGV, SIG_IGN);
		area = NULL;
	}
	if (strcmp(how, "sent") == 0)
		kill(getpid(), SIGSEGV);
	return *area;
}
