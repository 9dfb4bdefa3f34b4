/* Looking: a core that sleeps takes longer to wake than a quick partner to answer, so both ends of a line may look again
 * and again for a moment before they sleep. Never longer than they were told, and only while waits were usually shorter,
 * looks were not in vain, the core was not shared and there were cores enough for everybody: a core that looks is busy to
 * the scheduler, which would put the others somewhere else. */
#ifndef VIRTA_LOOK_H
#define VIRTA_LOOK_H
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

/* A look takes microseconds. Whoever needed so long for one shares the core with somebody who has much to do, if it was given
 * away meanwhile; a disk that is ready, and the system's work for it, takes less. */
#define AWAY_NS 300000
/* After so long there is time for a few microseconds between two looks: it is the disk that is waited for. */
#define EAGER_NS 40000
#define RELAX_TURNS 100
/* Waits without looking, after looking was in vain, after the core was shared, and however often that was. */
#define REST_WAITS_VAIN 4
#define REST_WAITS_AWAY 64
#define REST_WAITS_MAX 16384
/* Looks between two questions how many want to run: the answer takes microseconds. */
#define CROWD_LOOKS 16

static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Whether it is worth it, learned from how long waits were, and for how many waits it is not to be tried. */
typedef struct { int64_t limit, usual; unsigned rest, penalty, looks; } Look;

static inline void look_init(Look *look, int64_t limit)
{
    look->limit = limit;
    look->usual = 2 * limit;
}

static inline void look_learn(Look *look, int64_t waited)
{
    if (waited > 4 * look->limit) waited = 4 * look->limit;
    look->usual += (waited - look->usual) / 5;
}

/* Whether more want to run than there are cores; one more may be the system's own, at work for the disk. */
static inline int crowded(void)
{
    char text[64];
    int fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    text[size > 0 ? size : 0] = 0;
    char *slash = strchr(text, '/'); /* 0.10 0.20 0.30 2/345 6789: two of 345 want to run */
    while (slash && slash > text && slash[-1] != ' ') slash--;
    return slash && atol(slash) > sysconf(_SC_NPROCESSORS_ONLN) + 1;
}

/* No more looks for so many waits, and for longer the next time. */
static inline void look_rest(Look *look, unsigned least, unsigned times)
{
    if (look->penalty < least) look->penalty = least;
    look->rest = look->penalty;
    look->penalty *= times;
    if (look->penalty > REST_WAITS_MAX) look->penalty = REST_WAITS_MAX;
}

static inline int look_worthwhile(Look *look)
{
    if (look->rest && look->rest--) return 0;
    if (look->usual >= look->limit) return 0;
    if (++look->looks < CROWD_LOOKS || !crowded()) {
        look->looks %= CROWD_LOOKS;
        return 1;
    }
    look->looks = CROWD_LOOKS - 1; /* the next look asks at once */
    look_rest(look, REST_WAITS_AWAY, 4);
    return 0;
}

typedef struct { int64_t last, end, gap, eager; long given; int over; } Moment;

/* How often this thread's core was given to another. */
static inline long times_given(void)
{
#ifdef RUSAGE_THREAD
    struct rusage used;
    if (getrusage(RUSAGE_THREAD, &used) == 0) return used.ru_nvcsw + used.ru_nivcsw;
#endif
    return -1;
}

static inline Moment look_begin(const Look *look, int64_t now)
{
    return (Moment){.last = now, .end = now + look->limit, .eager = now + EAGER_NS, .given = times_given()};
}

static inline int look_shared(Moment *moment)
{
    long given = times_given();
    int shared = given < 0 || given != moment->given;
    if (!shared) moment->gap = 0;
    return shared;
}

/* A core that asks the system all the time slows down its sibling, which may be at the very work it waits for. */
static inline void look_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    for (int i = 0; i < RELAX_TURNS; i++) __builtin_ia32_pause();
#endif
}

/* Between two looks; 0: that was the last. Whoever else wants this core has it in between: perhaps the very partner,
 * so there is one more look after that, however long it took. */
static inline int look_on(Moment *moment)
{
    int64_t before = moment->last;
    if (moment->over) return 0;
    if (before > moment->eager) look_relax();
    sched_yield();
    moment->last = now_ns();
    moment->gap = moment->last - before;
    moment->over = (moment->gap >= AWAY_NS && look_shared(moment)) || moment->last >= moment->end;
    return 1;
}

/* Looking that is no good rests; each that is good makes the next rest shorter. One in ten in vain is too many; a core that
 * is shared takes far more time than looking ever saves. */
static inline void look_judge(Look *look, int found, const Moment *moment)
{
    int away = moment->gap > AWAY_NS;
    if (found && !away) look->penalty -= look->penalty / 16 + (look->penalty > 0);
    else look_rest(look, away ? REST_WAITS_AWAY : REST_WAITS_VAIN, away ? 4 : 2);
}
#endif
