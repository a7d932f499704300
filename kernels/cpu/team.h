/* Threads that go through a computation together, phase by phase, inside one parallel region of OpenMP.
 *
 * Starting a region for each of a layer's dozen steps costs more than the steps of a small model. Within one region,
 * threads wait for each other between phases by looking at a number: for some microseconds at once, then letting
 * others run. A phase's tasks are dealt out evenly and in order, so that each thread reads memory from one end to the
 * other, and one that has done its own takes over what others have not begun: a thread that has to share its core with
 * another process holds nobody up for longer than a task.
 */

#ifndef TEAM_H
#define TEAM_H

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#include "element.h"

enum { MAX_THREADS = 256, SPINS = 4096, CACHE_LINE = 64 };

typedef struct {
    /* How many tasks of its share of an even and of an odd phase are taken. */
    _Alignas(CACHE_LINE) _Atomic int64_t taken[2];
} Member;

typedef struct {
    _Alignas(CACHE_LINE) _Atomic int64_t arrived; /* at the end of any phase */
    Member members[MAX_THREADS];
} Team;

/* A thread of a team. */
typedef struct {
    Team *team;
    int rank, num_threads;
    int64_t phase;
} Worker;

/* Wait until all are here: what they have written is seen, and the next phase begins. */
INLINE void end_phase(Worker *w) {
    Team *team = w->team;
    const int64_t all = ++w->phase * w->num_threads;
    if (w->num_threads > 1) {
        atomic_fetch_add(&team->arrived, 1);
        for (int spins = 0; atomic_load(&team->arrived) < all; spins++) {
            if (spins >= SPINS)
                sched_yield();
#if defined(__x86_64__)
            else
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
