/* LD_PRELOAD shim of the crash tests: the n-th I/O call on files of one directory fails, is cut short, or kills us.
 *
 * Unarmed it only passes calls on. A process arms it through ctypes: fault_arm(directory, kinds, nth, action, error).
 * Calls go straight to the system, so that nothing of libc is needed that might be intercepted itself. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OPEN = 1, WRITE = 2, SYNC = 4, TRUNCATE = 8, RENAME = 16, UNLINK = 32 };
enum {
    PASS = 0,
    KILL_BEFORE = 1, /* die instead of the call */
    KILL_AFTER = 2,  /* die after it; after half of it when it writes */
    FAIL_ONCE = 3,
    FAIL_ON = 4,     /* this call and all after it */
    SHORT_ONCE = 5,  /* half a write, others pass */
    FULL_DISK = 6,   /* half a write, then every write fails */
    SLOW_FAIL = 7,   /* fail once, after a while: others queue up behind it */
};

static char where[4096];
static int kinds, action, error_number;
static long nth;
static _Atomic long seen;

void fault_arm(const char *directory, int of_kinds, long at, int what, int error)
{
    strncpy(where, directory, sizeof where - 1);
    kinds = of_kinds;
    nth = at;
    action = what;
    error_number = error;
    atomic_store(&seen, 0);
}

void fault_disarm(void) { kinds = 0; }

long fault_seen(void) { return atomic_load(&seen); }

static int path_is_ours(const char *path) { return path && strstr(path, where) != NULL; }

/* Not the control page: native code stores into it, plain code writes it, and its block is there since it was made. */
static int is_control(const char *path)
{
    size_t size = strlen(path);
    return size > 8 && strcmp(path + size - 8, "/control") == 0;
}

static int written_is_ours(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return path_is_ours(path) && !is_control(path);
}

static int fd_is_ours(int fd)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return path_is_ours(path);
}

static void die(void)
{
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

/* What to do with this call: PASS, an action that the caller finishes, or -1 with errno set. */
static int decide(int kind, int ours)
{
    if (!(kinds & kind) || !ours) return PASS;
    long now = atomic_fetch_add(&seen, 1) + 1;
    int hit = now == nth;
    switch (action) {
    case KILL_BEFORE: if (hit) die(); return PASS;
    case KILL_AFTER: case SHORT_ONCE: return hit ? action : PASS;
    case FAIL_ONCE: if (!hit) return PASS; break;
    case FAIL_ON: if (now < nth) return PASS; break;
    case FULL_DISK:
        if (now < nth || (kind & ~(WRITE | OPEN))) return PASS;
        if (hit && kind == WRITE) return SHORT_ONCE;
        break;
    case SLOW_FAIL: {
        if (!hit) return PASS;
        struct timespec t = {0, 200000000};
        syscall(SYS_nanosleep, &t, NULL);
        break;
    }
    default: return PASS;
    }
    errno = error_number;
    return -1;
}

static ssize_t do_write(int fd, const void *data, size_t size, off_t at, int positioned)
{
    int what = decide(WRITE, kinds && written_is_ours(fd));
    if (what < 0) return -1;
    if (what != PASS && size > 1) size /= 2;
    ssize_t n = positioned ? syscall(SYS_pwrite64, fd, data, size, at) : syscall(SYS_write, fd, data, size);
    if (what == KILL_AFTER) die();
    return n;
}

ssize_t write(int fd, const void *data, size_t size) { return do_write(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return do_write(fd, data, size, at, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return do_write(fd, data, size, at, 1); }

#define GUARD(kind, ours, call)                   \
    int what = decide(kind, kinds && (ours));     \
    if (what < 0) return -1;                      \
    int rc = (int)(call);                         \
    if (what == KILL_AFTER) die();                \
    return rc

int fsync(int fd) { GUARD(SYNC, fd_is_ours(fd), syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { GUARD(SYNC, fd_is_ours(fd), syscall(SYS_fdatasync, fd)); }
int ftruncate(int fd, off_t size) { GUARD(TRUNCATE, fd_is_ours(fd), syscall(SYS_ftruncate, fd, size)); }
int ftruncate64(int fd, off_t size) { GUARD(TRUNCATE, fd_is_ours(fd), syscall(SYS_ftruncate, fd, size)); }
int rename(const char *from, const char *to)
{
    GUARD(RENAME, path_is_ours(to), syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int unlink(const char *path) { GUARD(UNLINK, path_is_ours(path), syscall(SYS_unlinkat, AT_FDCWD, path, 0)); }

static int do_open(int at, const char *path, int flags, mode_t mode)
{
    GUARD(OPEN, path_is_ours(path), syscall(SYS_openat, at, path, flags, mode));
}

#define MODE                                      \
    mode_t mode = 0;                              \
    if (flags & (O_CREAT | O_TMPFILE)) {          \
        va_list args;                             \
        va_start(args, flags);                    \
        mode = va_arg(args, mode_t);              \
        va_end(args);                             \
    }

int open(const char *path, int flags, ...) { MODE return do_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return do_open(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
