/* Pagemill: big, fast memory that gives itself back. The C interface.
 *
 * Link with -lpagemill_ffi. Under `pagemill run` the same functions are there without it.
 */
#ifndef PAGEMILL_H
#define PAGEMILL_H

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PAGEMILL_NONVOLATILE 0
#define PAGEMILL_VOLATILE 1
#define PAGEMILL_VOLATILE_STRICT 2

/* A volatile range goes as a whole, or from its end, a chunk at a time, in turn with others. */
#define PAGEMILL_FULL 0
#define PAGEMILL_PARTIAL 1

/* Makes `len` bytes from `addr` on volatile: their contents may go when memory is needed, the least recently marked
 * first. Or nonvolatile: they stay from here on, and *purged (which may be null) says whether any had gone; those read
 * zero.
 *
 * What was purged of a strict range raises SIGBUS when it is touched, with the address in si_addr (system calls: EFAULT),
 * until it is nonvolatile; then it reads zero. This takes guard pages (Linux 6.13), and a handler before the program's own
 * for SIGSEGV: see pagemill_handle_fault.
 *
 * Marking what is marked marks it anew. Unmarking what is not marked does nothing. Before a part is unmapped, moved,
 * replaced or freed, or a part of a strict one is protected, it must be unmarked. Memory that is shared, of a file,
 * locked, protected or the first thread's stack can be marked and never goes.
 *
 * The handler of such a SIGBUS may call this for the page that raised it. Other handlers may not: as malloc, it takes locks.
 *
 * Returns the bytes that are marked, or that were; -1 with errno, and nothing has changed but *purged, which is 0:
 *   EINVAL  addr or len are no multiples of the page size, or mode or behaviour are unknown
 *   ENOMEM  a part is not mapped (of what is unmarked: and nothing of it was marked), or there is no memory or address
 *           space for the mark
 *   EFAULT  purged is no address that can be written to
 *   EOPNOTSUPP  a strict mark, and the kernel has no guard pages
 */
ssize_t pagemill_vrange(void *addr, size_t len, int mode, int behaviour, int *purged);

/* For a program's own handler of SIGSEGV (SA_SIGINFO) that it installs after its first strict mark: call this first, with
 * the handler's arguments, and return at once if it is not 0. Then the access is repeated, or SIGBUS comes where the fault
 * was. A handler that was there before that mark, or any under `pagemill run`, need not.
 */
int pagemill_handle_fault(int signal, const void *info, void *context);

#ifdef __cplusplus
}
#endif

#endif
