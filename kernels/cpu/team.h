/* Threads that go through a computation together, phase by phase, inside one parallel region of OpenMP.
 *
 * Starting a region for each of a layer's dozen steps costs more than the steps of a small model. Within one region,
 * threads wait for each other between phases by looking at a number, and after some ten microseconds asleep: whom they
 * wait for may have lost its core to another process, and can have theirs. A phase's tasks are dealt out evenly and in order, so that each thread reads memory from one end to the
 * other, and one that has done its own takes over what others have not begun: a thread that has to share its core with
 * another process holds nobody up for longer than a task.
 */

#ifndef TEAM_H
#define TEAM_H

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#if defined(__linux__)
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "element.h"

enum { MAX_THREADS = 256, SPINS = 1000, CACHE_LINE = 64 };

typedef struct {
    /* How many tasks of its share of an even and of an odd phase are taken. */
    _Alignas(CACHE_LINE) _Atomic int64_t taken[2];
} Member;

typedef struct {
    _Alignas(CACHE_LINE) _Atomic uint32_t arrived; /* at the end of any phase, all phases together */
    _Atomic uint32_t asleep;                       /* how many are, or are about to be */
    Member members[MAX_THREADS];
} Team;

/* A thread of a team. */
typedef struct {
    Team *team;
    int rank, num_threads;
    uint32_t phase;
} Worker;

/* Whether `team` has `all` of a phase's arrivals; they are counted modulo 2^32. */
INLINE int have_arrived(Team *team, uint32_t all) { return (int32_t)(atomic_load(&team->arrived) - all) >= 0; }

static inline void sleep_until_arrived(Team *team, uint32_t all) {
#if defined(__linux__)
    atomic_fetch_add(&team->asleep, 1);
    for (uint32_t arrived; (int32_t)((arrived = atomic_load(&team->arrived)) - all) < 0;)
        syscall(SYS_futex, &team->arrived, FUTEX_WAIT_PRIVATE, arrived, NULL, NULL, 0);
    atomic_fetch_sub(&team->asleep, 1);
#else
    while (!have_arrived(team, all))
        sched_yield();
#endif
}

INLINE void wake(Team *team) {
#if defined(__linux__)
    if (atomic_load(&team->asleep))
        syscall(SYS_futex, &team->arrived, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    (void)team;
#endif
}

/* Wait until all are here: what they have written is seen, and the next phase begins. */
INLINE void end_phase(Worker *w) {
    Team *team = w->team;
    const uint32_t all = ++w->phase * (uint32_t)w->num_threads;
    if (w->num_threads > 1) {
        if (atomic_fetch_add(&team->arrived, 1) + 1 == all)
            wake(team);
        for (int spins = 0; !have_arrived(team, all); spins++) {
            if (spins == SPINS)
                sleep_until_arrived(team, all);
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
    }
    /* Nobody looks at the last phase's any more, and nobody at the next one's before the end of this. */
    atomic_store_explicit(&team->members[w->rank].taken[(w->phase + 1) % 2], 0, memory_order_relaxed);
}

/* The tasks of a phase, numbered from 0. There is one such loop in a phase. */
typedef struct {
    Worker *worker;
    int64_t num_tasks;
    int helped; /* of whom tasks are taken, counted from oneself */
} Tasks;

INLINE Tasks tasks_of(Worker *w, int64_t num_tasks) { return (Tasks){w, num_tasks, 0}; }

/* The next one for this thread; -1 if none is left. */
INLINE int64_t next_task(Tasks *t) {
    const Worker *w = t->worker;
    for (; t->helped < w->num_threads; t->helped++) {
        const int64_t whose = (w->rank + t->helped) % w->num_threads;
        const int64_t first = whose * t->num_tasks / w->num_threads, end = (whose + 1) * t->num_tasks / w->num_threads;
        _Atomic int64_t *taken = &w->team->members[whose].taken[w->phase % 2];
        const int64_t task = first + atomic_fetch_add_explicit(taken, 1, memory_order_relaxed);
        if (task < end)
            return task;
    }
    return -1;
}

INLINE void gather_team(Team *team, int num_threads) {
    atomic_init(&team->arrived, 0);
    atomic_init(&team->asleep, 0);
    for (int i = 0; i < num_threads; i++)
        for (int parity = 0; parity < 2; parity++)
            atomic_init(&team->members[i].taken[parity], 0);
}

/* `call`, made by every one of at most `wanted_threads` threads with a `worker` of its own. */
#define WITH_TEAM(wanted_threads, worker, call)                                                                        \
    do {                                                                                                               \
        const int num_threads_ = (wanted_threads) < MAX_THREADS ? (wanted_threads) : MAX_THREADS;                      \
        Team team_;                                                                                                    \
        gather_team(&team_, num_threads_);                                                                             \
        _Pragma("omp parallel num_threads(num_threads_) if (num_threads_ > 1)") {                                      \
            Worker worker = {&team_, omp_get_thread_num(), omp_get_num_threads(), 0};                                  \
            call;                                                                                                      \
        }                                                                                                              \
    } while (0)

#endif
