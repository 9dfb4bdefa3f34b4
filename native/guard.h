/* Protect against mapped files that another process truncates: an access raises SIGBUS, which ends the
 * process.
 *
 * The handler restores the file's size and the access continues: it reads zeros, in a page that all processes
 * share, so the caller has to rebuild the contents. Where that is not allowed (a read-only descriptor) or
 * does not help (a full disk), it maps a private page of zeros instead and marks the guard as lost;
 * `guard_restore` maps the file again. Both ftruncate and mmap are plain system calls, safe in a handler.
 * Faults elsewhere, and signals sent by kill(2), are passed to the previous handler. */
#ifndef VIRTA_GUARD_H
#define VIRTA_GUARD_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define GUARDS_MAX 4096 /* one per mapped file; a process has about 1024 descriptors, and a log uses four */

typedef struct {
    _Atomic int used;
    _Atomic uintptr_t start; /* 0: this entry is free */
    size_t size;
    int fd, writable;
    _Atomic uint32_t faults;
    _Atomic int lost;
} Guard;

static Guard guards[GUARDS_MAX];
static _Atomic int guards_end; /* entries from here on were never used */
static struct sigaction guard_before;
static volatile sig_atomic_t guard_passed_on;

static int guard_is_short(const Guard *g)
{
    struct stat st;
    return fstat(g->fd, &st) == 0 && (uint64_t)st.st_size < g->size;
}

static void guard_repair(Guard *g, uintptr_t at)
{
    atomic_fetch_add(&g->faults, 1);
    if (g->writable && guard_is_short(g) && ftruncate(g->fd, (off_t)g->size) == 0) return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *zeros = mmap((void *)(at & ~(page - 1)), page, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (zeros == MAP_FAILED) abort(); /* returning would raise the same signal forever */
    atomic_store(&g->lost, 1);
}

static void guard_on_fault(int number, siginfo_t *info, void *context)
{
    int saved = errno, end = atomic_load(&guards_end);
    uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; info->si_code > 0 && i < end; i++) {
        uintptr_t start = atomic_load(&guards[i].start);
        if (!start || at - start >= guards[i].size) continue;
        guard_repair(&guards[i], at);
        errno = saved;
        return;
    }
    if (!guard_passed_on && guard_before.sa_flags & SA_SIGINFO) {
        guard_passed_on = 1; /* if that handler raises the signal again, use the default action */
        guard_before.sa_sigaction(number, info, context);
        guard_passed_on = 0;
    } else if (!guard_passed_on && guard_before.sa_handler != SIG_DFL && guard_before.sa_handler != SIG_IGN) {
        guard_passed_on = 1;
        guard_before.sa_handler(number);
        guard_passed_on = 0;
    } else if (info->si_code > 0 || guard_before.sa_handler != SIG_IGN) {
        signal(number, SIG_DFL);
        raise(number);
    }
    errno = saved;
}

/* Repeated for every file: another library may have installed its own handler since; ours then calls it. */
static int guard_install(void)
{
    struct sigaction now, ours = {0};
    if (sigaction(SIGBUS, NULL, &now) < 0) return -1;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == guard_on_fault) return 0;
    guard_before = now;
    ours.sa_sigaction = guard_on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, NULL);
}

/* Guard `size` mapped bytes of a file; `fd` is duplicated. NULL with errno set when that cannot be done. */
static Guard *guard_add(void *start, size_t size, int fd, int writable)
{
    if (guard_install() < 0) return NULL;
    for (int i = 0; i < GUARDS_MAX; i++) {
        int unused = 0;
        if (!atomic_compare_exchange_strong(&guards[i].used, &unused, 1)) continue;
        Guard *g = &guards[i];
        g->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (g->fd < 0) {
            atomic_store(&g->used, 0);
            return NULL;
        }
        g->size = size;
        g->writable = writable;
        atomic_store(&g->faults, 0);
        atomic_store(&g->lost, 0);
        int end = atomic_load(&guards_end);
        while (end <= i && !atomic_compare_exchange_weak(&guards_end, &end, i + 1)) {}
        atomic_store(&g->start, (uintptr_t)start);
        return g;
    }
    errno = EMFILE;
    return NULL;
}

/* Call this before unmapping. */
static void guard_remove(Guard *g)
{
    if (!g) return;
    atomic_store(&g->start, 0);
    close(g->fd);
    atomic_store(&g->used, 0);
}

/* Map the file again in place of a private page; return 0 when the file is mapped. */
static int guard_restore(Guard *g)
{
    if (!atomic_load(&g->lost)) return 0;
    if (guard_is_short(g) && !(g->writable && ftruncate(g->fd, (off_t)g->size) == 0)) {
        errno = EIO;
        return -1;
    }
    int access = PROT_READ | (g->writable ? PROT_WRITE : 0);
    void *start = (void *)atomic_load(&g->start);
    if (mmap(start, g->size, access, MAP_SHARED | MAP_FIXED, g->fd, 0) == MAP_FAILED) return -1;
    atomic_store(&g->lost, 0);
    return 0;
}

#endif
